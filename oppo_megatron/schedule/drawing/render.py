"""Timelines as text: a line a rank, time from left to right."""

from __future__ import annotations

from collections.abc import Sequence

from oppo_megatron.schedule.actions import Action, Op
from oppo_megatron.schedule.checking.checker import Fault
from oppo_megatron.schedule.checking.timeline import COMPUTE, Span, Timeline

LETTERS = {"actor": "P", "reference": "F", "critic": "C", "reward": "R"}
"""Prefill of each role; its score is the small letter."""

IDLE, FILL, FAILED = ".", "-", "!"
MIN_COLUMNS = 10


def render(timeline: Timeline, width: int = 100, faults: Sequence[Fault] = ()) -> str:
    """The rank x time grid in lines of at most `width` characters, with its legend.

    A cell shows what its rank does for most of that time: a letter, then the micro-batch where there is room.  `!` marks
    where a rank is stuck, and the actions of `faults`.
    """
    labels = {rank: f"rank {rank:{len(str(max(timeline.spans)))}} |" for rank in sorted(timeline.spans)}
    shares = {rank: f"| {timeline.bubble(rank):4.0%} idle" for rank in labels}
    room = max(len(labels[rank]) + len(shares[rank]) for rank in labels)
    columns = max(MIN_COLUMNS, width - room)
    lines = [f"{'':{len(next(iter(labels.values())))}}{_axis(timeline, columns)}"]
    for rank, label in labels.items():
        row = _row(timeline.spans[rank], timeline.makespan_s, columns)
        for at_s in failing_times(timeline, faults, rank):
            row[_column(at_s, timeline.makespan_s, columns)] = FAILED
        lines.append(label + "".join(row) + shares[rank])
    failed = any(FAILED in line for line in lines)
    return "\n".join([*lines, *_legend(timeline, width, failed)]) + "\n"


def failing_times(timeline: Timeline, faults: Sequence[Fault], rank: int) -> list[float]:
    """When, on `rank`, the actions of `faults` start, and since when the rank is stuck if it is."""
    spans = timeline.spans.get(rank, ())
    end_s = spans[-1].end_s if spans else 0.0
    positions = {fault.position for fault in faults if fault.rank == rank}
    times = [span.start_s for span in spans if span.position in positions]
    if rank in timeline.stuck or any(position >= len(spans) for position in positions):
        times.append(end_s)
    return times


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def letter(action: Action) -> str:
    """One character for an operation and role."""
    if action.op is Op.DECODE:
        return "D"
    if action.op is Op.SAMPLE:
        return "s"
    known = LETTERS.get(action.role, "X")
    return known if action.op is Op.PREFILL else known.lower()


def _axis(timeline: Timeline, columns: int) -> str:
    end = milliseconds(timeline.makespan_s)
    return f"0{end:>{columns - 1}}"


def _column(at_s: float, makespan_s: float, columns: int) -> int:
    return min(columns - 1, int(at_s / makespan_s * columns)) if makespan_s else 0


def _row(spans: Sequence[Span], makespan_s: float, columns: int) -> list[str]:
    """The cells of one rank: in each the action with the largest part of it, or idle where most of it is."""
    if not makespan_s:
        return [IDLE] * columns
    busy, most = [0.0] * columns, [0.0] * columns
    shown: list[Span | None] = [None] * columns
    cell_s = makespan_s / columns
    for span in spans:
        if span.action.op not in COMPUTE:
            continue
        for column in range(_column(span.start_s, makespan_s, columns), _column(span.end_s, makespan_s, columns) + 1):
            part = min(span.end_s, (column + 1) * cell_s) - max(span.start_s, column * cell_s)
            busy[column] += part
            if part > most[column]:
                most[column], shown[column] = part, span
    cells = [span if busy[i] >= cell_s / 2 else None for i, span in enumerate(shown)]
    return [_cell(cells, column) for column in range(columns)]


def _cell(cells: Sequence[Span | None], column: int) -> str:
    """A span over several cells: its letter, its micro-batch, then a line."""
    span = cells[column]
    if span is None:
        return IDLE
    first = column
    while first > 0 and cells[first - 1] is span:
        first -= 1
    length = next((i for i in range(column, len(cells)) if cells[i] is not span), len(cells)) - first
    number = str(span.action.micro_batch)
    text = letter(span.action) + (number if len(number) < length else "")
    return text[column - first] if column - first < len(text) else FILL


def _legend(timeline: Timeline, width: int, failed: bool) -> list[str]:
    """What the letters stand for, wrapped at `width`."""
    words = {}
    for spans in timeline.spans.values():
        for action in (span.action for span in spans if span.action.op in COMPUTE):
            scored = action.op in (Op.PREFILL, Op.SCORE)
            words[letter(action)] = f"{action.op.value} {action.role}" if scored else action.op.value
    entries = [f"{key} {text}" for key, text in sorted(words.items())]
    entries += [f"{IDLE} idle", "digits: micro-batch"] + ([f"{FAILED} fault"] if failed else [])
    lines = [""]
    for entry in entries:
        joined = f"{lines[-1]}, {entry}" if lines[-1] else entry
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(entry)
    return lines
