"""Spans of a run: a step's timeline and waits, and each rank's share of useful work (the OPPO paper's Figure 5)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from oppo_megatron.errors import DataError
from oppo_megatron.report.charts import COLOURS, GRID, MAX_ROWS, OTHER_COLOUR, SPAN_COLOURS, add_legend, new_figure, show
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import Span, read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAITING = ("wait", "wait_scores", "wait_tokens", "wait_update")
KINDS = ("decode", "score", "update")
OTHER_STEP_ALPHA = 0.4
END_STYLE: Any = (0, (4, 2))


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Spans from a step's start to the next's."""

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


@dataclass(frozen=True)
class Timeline:
    name: str
    windows: Mapping[str, StepWindow]
    title: str = "Timeline of a step of each run"
    note: str = ""
    wide: bool = True


def step_bounds(spans: Sequence[Span]) -> dict[int, tuple[float, float]]:
    """Start and end of each step, from its first span of work to the next step's first; work over two steps counts once."""
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
    """Cut a step out of spans; None: of median length, except the first if possible.  Raises DataError."""
    bounds = step_bounds(spans)
    if not bounds or (step is not None and step not in bounds):
        have = f"has work of steps {min(bounds)} to {max(bounds)}" if bounds else "has no work of any step"
        raise DataError(f"{name}: the trace {have}, asked for {'any' if step is None else step}; choose a step it has")
    if step is None:
        lengths = {step: end - start for step, (start, end) in bounds.items()}
        candidates = list(lengths)[1:] or list(lengths)
        middle = median_low(lengths[step] for step in candidates)
        step = next(step for step in candidates if lengths[step] == middle)
    start, end = bounds[step]
    return StepWindow(step, start, end, [span for span in spans if span.start < end and span.end > start])


def waits(window: StepWindow) -> dict[tuple[int, str], dict[str, float]]:
    """Seconds by rank and role, then by kind of waiting."""
    seconds: dict[tuple[int, str], dict[str, float]] = {lane: {} for lane in window.lanes}
    for span in window.spans:
        if span.name in WAITING:
            lane = seconds[span.rank, span.role]
            inside = min(span.end, window.end) - max(span.start, window.start)
            lane[span.name] = lane.get(span.name, 0.0) + inside
    return seconds


def draw_windows(windows: Mapping[str, StepWindow]) -> Figure:
    rows = [min(len(window.lanes), MAX_ROWS) for window in windows.values()]
    figure = new_figure(11.0, 1.3 + sum(0.75 + 0.42 * count for count in rows))
    heights = [count + 0.6 for count in rows]
    panels = figure.subplots(len(windows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, window) in zip(panels, windows.items(), strict=True):
        draw_window(axes, name, window)
    panels[-1].set_xlim(0.0, 1.02 * max(window.seconds for window in windows.values()))
    panels[-1].set_xlabel("seconds since the step's start")
    _draw_legend(figure, list(windows.values()))
    return figure


def draw_window(axes: Axes, name: str, window: StepWindow) -> None:
    """Draw bars clipped to the step, at most `MAX_ROWS` rows."""
    row_of = {lane: row for row, lane in enumerate(window.lanes[:MAX_ROWS])}
    bars: dict[tuple[bool, int, str, bool], list[tuple[float, float]]] = defaultdict(list)
    for span in window.spans:
        if (row := row_of.get((span.rank, span.role))) is not None:
            left = max(span.start, window.start) - window.start
            right = min(span.end, window.end) - window.start
            bars[span.name not in WAITING, row, span.name, span.step == window.step].append((left, right - left))
    # Sorted, waiting comes first, so work within a wait is drawn over it.
    for (works, row, span_name, of_this_step), extents in sorted(bars.items()):
        axes.broken_barh(
            extents, (row - 0.36, 0.72), alpha=1.0 if of_this_step else OTHER_STEP_ALPHA, edgecolor="white", linewidth=0.2,
            facecolor=SPAN_COLOURS.get(span_name, OTHER_COLOUR) if works else COLOURS["idle"],
        )  # fmt: skip
    axes.axvline(window.seconds, color="black", linewidth=1.2, linestyle=END_STYLE)
    left_out = f" (first {MAX_ROWS} of {len(window.lanes)} rows)" if len(window.lanes) > MAX_ROWS else ""
    title = f"{show(name)}: step {window.step}, {window.seconds:.3g} s{left_out}"
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", parse_math=False)
    axes.set_yticks(range(len(row_of)), [f"rank {rank} \N{MIDDLE DOT} {role}" for rank, role in row_of])
    axes.set_ylim(len(row_of) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_legend(figure: Figure, windows: Sequence[StepWindow]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seen = {span.name for window in windows for span in window.spans}
    entries: list[tuple[Any, str]] = [(Patch(facecolor=colour), name) for name, colour in SPAN_COLOURS.items() if name in seen]
    if seen - SPAN_COLOURS.keys() - set(WAITING):
        entries.append((Patch(facecolor=OTHER_COLOUR), "other"))
    if seen & set(WAITING):
        entries.append((Patch(facecolor=COLOURS["idle"]), "waiting"))
    if any(span.step != window.step for window in windows for span in window.spans):
        entries.append((Patch(facecolor=COLOURS["update"], alpha=OTHER_STEP_ALPHA), "paler: work of another step"))
    entries.append((Line2D([], [], color="black", linewidth=1.2, linestyle=END_STYLE), "end of the step"))
    handles, names = zip(*entries, strict=True)
    add_legend(figure, handles, names, columns=6)


def utilization(runs: Sequence[Path]) -> list[dict[str, float]]:
    """Each rank's percentages of decoding, scoring, updates and idle time, from step 2 on (step 1 if alone), over all runs."""
    return shares([(str(run), read_trace(RunDirectory(run).trace)) for run in runs])


def shares(traces: Sequence[tuple[str, Sequence[Span]]]) -> list[dict[str, float]]:
    """`utilization` of (name, spans) per run."""
    busy: dict[int, dict[str, float]] = {}
    total_s = 0.0
    for name, spans in traces:
        work = _work(name, spans)
        start = min(span.start for span in [span for span in work if span.step > 1] or work)
        end = max(span.end for span in work)
        total_s += end - start
        for span in spans:
            seconds = busy.setdefault(span.rank, dict.fromkeys(KINDS, 0.0))
            if (kind := kind_of(span)) is not None:
                seconds[kind] += max(0.0, min(span.end, end) - max(span.start, start))
    rows = []
    for rank, seconds in sorted(busy.items()):
        percent = {kind: 100 * value / total_s for kind, value in seconds.items()}
        rows.append({"rank": rank, **percent, "idle": 100 - sum(percent.values())})
    return rows


def work_seconds(run: Path) -> dict[int, dict[int, float]]:
    """Seconds of work by rank, then step."""
    work: dict[int, dict[int, float]] = {}
    for span in _work(str(run), read_trace(RunDirectory(run).trace)):
        steps = work.setdefault(span.rank, {})
        steps[span.step] = steps.get(span.step, 0.0) + span.end - span.start
    return work


def kind_of(span: Span) -> str | None:
    """Entry in `KINDS` of a label or action (`prefill reward m0 c3`), or None."""
    word = span.name.split(" ")[0]
    if word in ("decode", "sample") or (word == "prefill" and span.role == "actor"):
        return "decode"
    if word in ("score", "prefill"):
        return "score"
    return "update" if word == "update" else None


def _work(run: str, spans: Iterable[Span]) -> list[Span]:
    work = [span for span in spans if kind_of(span) is not None]
    if not work:
        raise DataError(f"{run}: its trace has no work of any step; run it again with logging.trace=true")
    return work
