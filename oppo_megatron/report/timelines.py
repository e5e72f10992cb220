"""The timeline of every step as data for the page's script, thinned where a run is long.

A step's spans are one flat list of integers, six a span:

    lane, kind, start, duration, 1 where it is work of another step, spans merged into it

with microseconds since the step's start.  `lanes` and `kinds` of the run name what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from oppo_megatron.report.run_records import RunRecord
from oppo_megatron.rundir.step_window import WAITING, StepWindow, all_windows, median_step
from oppo_megatron.rundir.trace import Span

SPANS_OF_PAGE = 240_000
SPANS_IN_FULL = 6_000
SPANS_AT_LEAST = 60
COLOUR_OF = {
    "decode": "decode", "sample": "decode", "prefill": "prefill", "score": "score", "update": "update", "send": "send",
    "experience": "critic", "evaluate": "evaluate", "load": "other", "save": "other", "recv": "idle",
}  # fmt: skip


@dataclass(frozen=True)
class _Bar:
    """A span within its window, in microseconds; `count` spans are merged into it."""

    lane: int
    name: str
    start: int
    end: int
    other_step: bool
    count: int = 1


def colour_of(name: str) -> str:
    """The colour of a span, by its name or, where every action is traced, by the action's first word."""
    return "idle" if name in WAITING else COLOUR_OF.get(name.split(" ")[0], "other")


def timeline(record: RunRecord, budget: int, asked: Sequence[int] = ()) -> dict[str, Any] | None:
    """The steps of a run in about `budget` spans; None where the run has no spans of any step.

    The steps `asked` for, the first, the last, the slowest and the one of median length keep up to `SPANS_IN_FULL`
    spans; of the others neighbouring spans of the same kind are merged until the step has its share of the budget.
    Where even that is too much, steps are left out evenly.
    """
    windows = list(all_windows(record.spans))
    if not windows:
        return None
    in_full = _in_full(windows) | {window.step for window in windows if window.step in set(asked)}
    shown = _kept(windows, in_full, budget // SPANS_AT_LEAST)
    share = max(SPANS_AT_LEAST, budget // len(shown))
    whole = max(share, min(SPANS_IN_FULL, budget // 8))
    lanes = sorted({lane for window in shown for lane in window.lanes})
    names: dict[str, int] = {}
    steps = []
    for window in shown:
        bars, is_whole = _thinned(window, lanes, whole if window.step in in_full else share)
        flat = [
            number
            for bar in bars
            for number in (
                bar.lane, names.setdefault(bar.name, len(names)), bar.start, bar.end - bar.start, int(bar.other_step), bar.count,
            )
        ]  # fmt: skip
        steps.append([window.step, round(window.seconds * 1e6), int(is_whole), flat])
    return {
        "name": record.name,
        "lanes": [f"rank {rank} \N{MIDDLE DOT} {role}" for rank, role in lanes],
        "kinds": [[name, colour_of(name)] for name in names],
        "steps": steps,
        "first": _shown_first(windows),
        "leftOut": len(windows) - len(shown),
    }


def _in_full(windows: Sequence[StepWindow]) -> set[int]:
    slowest = sorted(windows, key=lambda window: -window.seconds)[:3]
    return {windows[0].step, windows[-1].step, _shown_first(windows), *(window.step for window in slowest)}


def _shown_first(windows: Sequence[StepWindow]) -> int:
    return median_step({window.step: (window.start, window.end) for window in windows})


def _kept(windows: Sequence[StepWindow], in_full: set[int], most: int) -> list[StepWindow]:
    """All steps, or so many of them, evenly chosen."""
    if len(windows) <= most:
        return list(windows)
    every = -(-len(windows) // most)
    return [window for place, window in enumerate(windows) if place % every == 0 or window.step in in_full]


def _thinned(window: StepWindow, lanes: Sequence[tuple[int, str]], most: int) -> tuple[list[_Bar], bool]:
    """The bars of a window, merged over ever longer gaps until they are few enough; and whether none was merged."""
    place = {lane: number for number, lane in enumerate(lanes)}
    # Waiting first, so that work which lies within it is drawn over it.
    order = sorted(window.spans, key=lambda s: (place[s.rank, s.role], s.name not in WAITING, s.start))
    bars = [_bar(span, window, place) for span in order]
    gap = window.seconds * 1e6 / 4000
    whole = len(bars) <= most
    while len(bars) > most:
        merged = list(_merged(bars, gap))
        if gap > window.seconds * 1e6:
            return merged, False
        bars, gap = merged, gap * 2
    return bars, whole


def _bar(span: Span, window: StepWindow, place: dict[tuple[int, str], int]) -> _Bar:
    start = round((max(span.start, window.start) - window.start) * 1e6)
    end = round((min(span.end, window.end) - window.start) * 1e6)
    return _Bar(place[span.rank, span.role], span.name, start, end, span.step != window.step)


def _merged(bars: Sequence[_Bar], gap: float) -> Iterator[_Bar]:
    """Bars of one lane and colour that follow each other within `gap` microseconds become one."""
    before: _Bar | None = None
    for bar in bars:
        if (
            before is not None
            and (before.lane, before.other_step) == (bar.lane, bar.other_step)
            and colour_of(before.name) == colour_of(bar.name)
            and bar.start - before.end <= gap
        ):
            count = before.count + bar.count
            name = before.name if before.name == bar.name else before.name.split(" ")[0]
            before = _Bar(bar.lane, name, before.start, max(before.end, bar.end), bar.other_step, count)
        else:
            if before is not None:
                yield before
            before = bar
    if before is not None:
        yield before
