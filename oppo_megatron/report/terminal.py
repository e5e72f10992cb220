"""The figures of a run in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from oppo_megatron.clock import format_duration
from oppo_megatron.errors import DataError
from oppo_megatron.report.charts import short
from oppo_megatron.report.colours import COLOURS
from oppo_megatron.report.live import Glance
from oppo_megatron.report.machine import USES, memory_peaks, steady
from oppo_megatron.report.page import show
from oppo_megatron.report.plots import moving_mean
from oppo_megatron.report.progress import QUARTERS, deferred_counts
from oppo_megatron.report.run_records import ALL_PARTS, RunRecord, number, split_step
from oppo_megatron.report.timelines import colour_of
from oppo_megatron.report.utilization import shares
from oppo_megatron.rundir.step_window import StepWindow, step_bounds, step_window

BLOCKS = "▁▂▃▄▅▆▇█"
# Kinds of work can be told apart without colour, too.
GLYPHS = {"score": "▓", "prefill": "▓", "update": "▒", "critic": "░", "send": "░", "idle": "·"}
BAR, SPARK, SHORT_SPARK, LANE = 30, 36, 24, 100  # columns at most
NARROWEST = 6  # columns at least
FRAME = 4  # columns of a panel's border and padding
RECENT = 10
QUIET_S = 120.0
TWO_COLUMNS = 110
SHOWN_RESPONSE = 400


@dataclass(frozen=True)
class Block:
    """A figure: lines of text under a title."""

    title: str
    lines: Sequence[Text]

    def panel(self, most_lines: int | None = None) -> Panel:
        """Within a frame; of more than `most_lines` the first, and how many are left out."""
        lines = list(self.lines)
        if most_lines is not None and len(lines) > most_lines:
            kept = max(1, most_lines - 1)
            lines = [*lines[:kept], Text(f"… {len(lines) - kept} more lines: --once shows all", style="dim")]
        return Panel(Group(*lines), title=self.title, title_align="left", padding=(0, 1), border_style="dim")


def draw(glance: Glance, width: int) -> RenderableType:
    """Everything, for a terminal of `width` columns."""
    return Group(head(glance), *(row_of([block.panel() for block in row]) for row in rows_of(glance, width)))


def rows_of(glance: Glance, width: int) -> list[list[Block]]:
    """The figures from top to bottom, one or two beside each other."""
    record, columns = glance.record, 2 if width >= TWO_COLUMNS else 1
    room = width // columns - FRAME
    blocks = [
        Block("reward", _reward(record, room)),
        Block("step time", _step_time(record, room)),
        Block("utilisation", _utilization(record, room)),
        Block("Δ and chunk", _control(record, room)),
        Block("deferrals", _deferrals(record, room)),
        Block("lengths", _lengths(record, room)),
        Block("reward by length", _bins(record, room)),
        Block("memory", _memory(record, room)),
    ]
    rows = [blocks[start : start + columns] for start in range(0, len(blocks), columns)]
    last = Block("last whole step", _timeline(record, width - FRAME)), Block("newest response", _response(glance))
    return [*rows, *([block] for block in last)]


def row_of(panels: Sequence[Panel]) -> RenderableType:
    """The panels beside each other, equally wide."""
    if len(panels) == 1:
        return panels[0]
    grid = Table.grid(expand=True)
    for _ in panels:
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def head(glance: Glance) -> Text:
    """The run's name, how far it is, and whether it goes on."""
    record = glance.record
    done, total = (record.lines[-1]["step"] if record.lines else 0), record.config.get("steps")
    text = Text(f"{show(record.name)}  ", style="bold")
    text.append(f"step {done}" + (f" of {total}" if isinstance(total, int) else ""), style="not bold")
    recent = [value for value in record.column("step_s")[1][-RECENT:] if value is not None]
    if not glance.finished and isinstance(total, int) and recent and total > done:
        text.append(f"  ETA {format_duration((total - done) * sum(recent) / len(recent))}", style="not bold")
    if glance.finished:
        state, style = "finished", "green"
    elif glance.quiet_s is None:
        state, style = "waiting for its first step", "yellow"
    elif glance.quiet_s > max(QUIET_S, 5 * max(recent, default=0.0)):
        state, style = f"no step for {format_duration(glance.quiet_s)}: it may have ended early", "red"
    else:
        state, style = f"last step {format_duration(glance.quiet_s)} ago", "green"
    return text.append(f"  {state}", style=f"not bold {style}")


def _missing(record: RunRecord, what: str, why: str = "") -> list[Text]:
    reason = why or ("no step has ended yet" if not record.lines else "the run does not record it")
    return [Text(f"no {what} ({reason})", style="dim")]


def spark(values: Sequence[float], width: int = SPARK) -> str:
    """The values as a line of blocks, the lowest lowest; of many, the mean of neighbours."""
    if len(values) > width:
        edges = [len(values) * place // width for place in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in values)


def _fit(room: int, taken: int, most: int) -> int:
    """The columns for a bar or a line of blocks, at most `most`, beside text that takes `taken` of them."""
    return max(NARROWEST, min(most, room - taken))


def _bar(parts: Sequence[tuple[float, str]], total: float, width: int) -> Text:
    """Parts of a whole as coloured blocks."""
    text, reached, drawn = Text(), 0.0, 0
    for value, colour in parts:
        reached += value
        end = round(width * min(1.0, reached / total)) if total > 0 else 0
        text.append(GLYPHS.get(colour, "█") * (end - drawn), style=COLOURS[colour][1])
        drawn = max(drawn, end)
    return text.append(" " * (width - drawn))


def _key(colour: str) -> tuple[str, str]:
    return f"{GLYPHS.get(colour, '█')} ", COLOURS[colour][1]


def _known(record: RunRecord, key: str) -> list[float]:
    return [value for value in record.column(key)[1] if value is not None]


def _reward(record: RunRecord, room: int) -> list[Text]:
    key = "loss" if record.kind == "supervised" else "reward_mean"
    values = _known(record, key)
    if not values:
        return _missing(record, "reward")
    smooth = moving_mean(values, max(1, len(values) // 10))
    seconds = _known(record, "time_s")
    told = f"{'loss' if key == 'loss' else 'mean'} {short(round(smooth[0], 4))} → {short(round(smooth[-1], 4))}"
    told += f" in {format_duration(seconds[-1])}" if seconds else ""
    return [Text(spark(smooth, _fit(room, 0, SPARK)), style=COLOURS["run0"][1]), Text(told)]


def _step_time(record: RunRecord, room: int) -> list[Text]:
    lines = [line for line in steady(record.lines)[-RECENT:] if number(line, "step_s") is not None]
    if not lines or record.kind == "supervised":
        return _missing(record, "split of the step time")
    splits = [split_step(line) for line in lines]
    means = {key: sum(split[key] for split in splits) / len(splits) for key in ALL_PARTS}
    total = sum(means.values())
    bar = _bar([(means[k], ALL_PARTS[k][1]) for k in means], total, _fit(room, 24, BAR))
    rows = [Text.assemble(bar, f" {total:.3g} s, mean of {len(lines)}")]
    label_room = _fit(room, 19, 26)
    for key, value in means.items():
        label, colour = ALL_PARTS[key]
        percent = 100 * value / (total or 1.0)
        label = label if len(label) <= label_room else label[: label_room - 1] + "…"
        rows.append(Text.assemble(_key(colour), f"{label:<{label_room}}{value:>8.3g} s {percent:>4.0f} %"))
    return rows


def _utilization(record: RunRecord, room: int) -> list[Text]:
    try:
        ranks = shares([(record.name, record.spans)]) if record.spans else []
    except DataError:
        ranks = []
    if not ranks:
        return _missing(record, "utilisation", record.no_spans)
    rows = []
    for row in ranks:
        parts = [(max(0.0, row[use]), colour) for use, colour in USES.items()]
        bar = _bar(parts, 100.0, _fit(room, 15, BAR))
        rows.append(Text.assemble(f"rank {row['rank']:<3.0f} ", bar, f" {100 - row['idle']:>3.0f} %"))
    keys = [text for use, colour in USES.items() for text in (_key(colour), f"{use}  ")]
    return [*rows, Text.assemble(*keys)]


def _control(record: RunRecord, room: int) -> list[Text]:
    rows = []
    for key, label in (("delta", "Δ"), ("chunk_tokens", "chunk")):
        values = _known(record, key)
        if not values:
            rows += _missing(record, label)
            continue
        line = spark(values, _fit(room, 13, SHORT_SPARK))
        rows.append(Text.assemble(f"{label:<6}{short(values[-1]):>5}  ", (line, COLOURS["run0"][1])))
        reason = record.lines[-1].get(f"{key.split('_')[0]}_reason")
        if reason:
            rows.append(Text(show(str(reason)), style="dim"))
    return rows


def _deferrals(record: RunRecord, room: int) -> list[Text]:
    counts = deferred_counts(record.lines)
    if not counts:
        return _missing(record, "deferrals")
    total = sum(counts.values())
    columns = _fit(room, 14, BAR)
    return [
        Text.assemble(f"{times}×  ", _bar([(count, "run0")], total, columns), f" {100 * count / total:>6.2f} %")
        for times, count in sorted(counts.items())
    ]


def _lengths(record: RunRecord, room: int) -> list[Text]:
    rows = []
    for key, label in (("trained_len_mean", "trained"), ("submitted_len_mean", "submitted")):
        if values := _known(record, key):
            line = spark(values, _fit(room, 26, SHORT_SPARK))
            rows.append(Text.assemble(f"{label:<10}{values[-1]:>7.1f} tokens  ", (line, COLOURS["run0"][1])))
    if gaps := _known(record, "length_gap"):
        rows.append(Text(f"{'gap':<10}{100 * gaps[-1]:>7.1f} %"))
    return rows or _missing(record, "lengths")


def _bins(record: RunRecord, room: int) -> list[Text]:
    rows = []
    for place, (quarter, label) in enumerate(QUARTERS.items()):
        values = _known(record, f"reward_by_quarter.{quarter}")
        if values:
            recent = values[-RECENT:]
            mean = sum(recent) / len(recent)
            line = spark(moving_mean(values, max(1, len(values) // 10)), _fit(room, 26, SHORT_SPARK))
            rows.append(Text.assemble(f"{label:<17}{mean:>7.3f}  ", (line, COLOURS[f"run{place}"][1])))
    return rows or _missing(record, "reward by length")


def _memory(record: RunRecord, room: int) -> list[Text]:
    for line in reversed(record.lines):
        if peaks := memory_peaks(line):
            highest, columns = max(value or 0.0 for value in peaks), _fit(room, 20, BAR)
            return [
                Text.assemble(
                    f"rank {rank:<3} ",
                    _bar([(value or 0.0, "run0")], highest, columns),
                    f" {short(round(value or 0.0))} MiB",
                )
                for rank, value in enumerate(peaks)
            ]
    return _missing(record, "memory of the ranks")


def _timeline(record: RunRecord, room: int) -> list[Text]:
    steps = list(step_bounds(record.spans))
    if not steps:
        return _missing(record, "timeline", record.no_spans or "its trace has no work of any step yet")
    is_whole = record.summary is not None or len(steps) == 1
    window = step_window(record.name, record.spans, steps[-1] if is_whole else steps[-2])
    names = [f"rank {rank} {role}" for rank, role in window.lanes]
    widest = max(map(len, names))
    columns = _fit(room, widest + 2, LANE)
    rows = [
        Text.assemble(f"{name:<{widest}}  ", _lane(window, lane, columns))
        for name, lane in zip(names, window.lanes, strict=True)
    ]
    return [Text(f"step {window.step}, {window.seconds:.3g} s", style="dim"), *rows]


def _lane(window: StepWindow, lane: tuple[int, str], columns: int) -> Text:
    """A lane as blocks: each has the colour of the kind of work that takes most of its time."""
    cells: list[dict[str, float]] = [{} for _ in range(columns)]
    size = window.seconds / columns or 1.0
    for span in window.spans:
        if (span.rank, span.role) != lane:
            continue
        start, end = max(span.start, window.start) - window.start, min(span.end, window.end) - window.start
        colour = colour_of(span.name)
        for place in range(int(start / size), min(columns, int(end / size) + 1)):
            inside = min(end, (place + 1) * size) - max(start, place * size)
            cells[place][colour] = cells[place].get(colour, 0.0) + max(0.0, inside)
    text = Text()
    for cell in cells:
        busy = {colour: seconds for colour, seconds in cell.items() if seconds > 0.05 * size}
        # Work that lies within a wait is shown before the wait.
        colour = max(busy, key=lambda c: (c != "idle", busy[c]), default="")
        text.append(GLYPHS.get(colour, "█") if colour else " ", style=COLOURS[colour][1] if colour else "")
    return text


def _response(glance: Glance) -> list[Text]:
    row: Mapping[str, Any] | None = glance.newest
    if row is None:
        return _missing(glance.record, "responses", "run with logging.rollouts=true")
    reward = number(row, "reward")
    about = f"step {row.get('step')}, reward {'–' if reward is None else short(round(reward, 4))}"
    text = show(str(row.get("response", "")))
    more = " …" if len(text) > SHOWN_RESPONSE else ""
    return [Text(about, style="bold"), Text(text[:SHOWN_RESPONSE] + more)]
