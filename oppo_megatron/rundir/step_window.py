"""The part of a trace that belongs to one step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low

from oppo_megatron.errors import DataError
from oppo_megatron.rundir.trace import Span

WAITING = ("wait", "wait_scores", "wait_tokens", "wait_update")


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The spans that lie, at least in part, between the start of a step and the start of the next one."""

    step: int
    start: float
    end: float
    spans: list[Span]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def lanes(self) -> list[tuple[int, str]]:
        """(rank, role) of each row, top to bottom."""
        return sorted({(span.rank, span.role) for span in self.spans})


def step_bounds(spans: Sequence[Span]) -> dict[int, tuple[float, float]]:
    """When each step begins and ends, in step order.

    A step lasts from its first span of work to that of the next step (the last step: to its last span of work), so that
    work which overlaps two steps is not counted twice.  Waiting and evaluation do not bound a step.
    """
    work = [span for span in spans if span.name not in WAITING and span.name != "evaluate"]
    starts: dict[int, float] = {}
    for span in work:
        starts[span.step] = min(span.start, starts.get(span.step, span.start))
    steps = sorted(starts)
    if not steps:
        return {}
    last_end = max(span.end for span in work if span.step == steps[-1])
    ends = [*(starts[later] for later in steps[1:]), last_end]
    return {step: (starts[step], end) for step, end in zip(steps, ends, strict=True)}


def step_window(name: str, spans: Sequence[Span], step: int | None) -> StepWindow:
    """Cut one step out of a run's spans: `step`, or the one of median length where it is None.

    The first step, which warms up, is not picked where there are others.  Raises DataError.
    """
    bounds = step_bounds(spans)
    if not bounds or (step is not None and step not in bounds):
        have = f"has work of steps {min(bounds)} to {max(bounds)}" if bounds else "has no work of any step"
        raise DataError(
            f"{name}: the trace {have}, asked for {'any' if step is None else step}; choose a step that it has"
        )
    if step is None:
        step = median_step(bounds)
    start, end = bounds[step]
    return StepWindow(step, start, end, [span for span in spans if span.start < end and span.end > start])


def median_step(bounds: dict[int, tuple[float, float]]) -> int:
    """The step of median length, but not the first where there are others."""
    lengths = {step: end - start for step, (start, end) in bounds.items()}
    candidates = list(lengths)[1:] or list(lengths)
    middle = median_low(lengths[step] for step in candidates)
    return next(step for step in candidates if lengths[step] == middle)


def all_windows(spans: Sequence[Span]) -> Iterator[StepWindow]:
    """The window of every step, in step order, in one pass over the spans."""
    bounds = step_bounds(spans)
    order = list(bounds)
    starts = [bounds[step][0] for step in order]
    within: dict[int, list[Span]] = {step: [] for step in order}
    for span in spans:
        # From the step under way where the span begins to the one under way where it ends.
        first = max(0, bisect_left(starts, span.start) - 1)
        for step in order[first : bisect_left(starts, span.end)]:
            start, end = bounds[step]
            if span.start < end and span.end > start:
                within[step].append(span)
    for step in order:
        yield StepWindow(step, *bounds[step], within[step])
