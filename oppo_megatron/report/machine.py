"""The sections of the page about time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, TypeGuard

from oppo_megatron.errors import DataError
from oppo_megatron.report.charts import MAX_BARS, BarChart, Bars, Line, LineChart, short
from oppo_megatron.report.colours import run_colour
from oppo_megatron.report.page import Section, Table
from oppo_megatron.report.progress import STEP_AXIS
from oppo_megatron.report.run_records import ALL_PARTS, RunRecord, number, split_step
from oppo_megatron.report.utilization import shares

DOT = " \N{MIDDLE DOT} "
MANY_RANKS = 8
USES = {"decode": "decode", "score": "score", "update": "update", "idle": "idle"}


def step_section(records: Sequence[RunRecord]) -> Section:
    """Seconds of a step, by what the actor's rank does in them."""
    section = Section(
        "steps",
        "Where a step's time goes",
        "Seconds of each step on the actor's output rank. Exposed scoring: what nothing hid. Idle and other: waits for the "
        "pipeline and for other ranks, planning, logs.",
    )
    splits: dict[int, list[tuple[int, dict[str, float]]]] = {}
    for i, record in enumerate(records):
        found = [(line["step"], split_step(line)) for line in record.lines if number(line, "step_s") is not None]
        if record.kind == "supervised" or not found:
            section.lacks(record, "split of the step time")
        else:
            splits[i] = found
    if splits:
        means = {records[i].name: _mean_split(steady(found)) for i, found in splits.items()}
        left_out = any(len(steady(found)) < len(found) for found in splits.values())
        section.charts.append(_mean_chart(means, ", first step left out" if left_out else ""))
        binned = {i: _bins(found) for i, found in splits.items()}
        high = max(sum(parts.values()) for bins in binned.values() for _, parts in bins)
        section.charts += [_step_chart(records[i], i, bins, high) for i, bins in binned.items()]
        section.tables.append(_mean_table(means))
    return section


def _mean_chart(means: Mapping[str, Mapping[str, float]], of: str) -> BarChart:
    bars = [Bars(label, [mean[key] for mean in means.values()], colour) for key, (label, colour) in ALL_PARTS.items()]
    ends = [f"{sum(mean.values()):.3g} s" for mean in means.values()]
    title = f"Mean step{of}"
    return BarChart(
        "steps-mean", title, "run", "seconds a step", list(means), bars, stacked=True, horizontal=True, ends=ends
    )


def _mean_table(means: Mapping[str, Mapping[str, float]]) -> Table:
    rows = []
    for name, mean in means.items():
        total = sum(mean.values()) or 1.0
        rows.append([name, *(f"{mean[key]:.3g} s ({100 * mean[key] / total:.0f} %)" for key in ALL_PARTS)])
    return Table("", ["mean of a step", *(label for label, _ in ALL_PARTS.values())], rows)


def steady(found: Sequence[Any]) -> Sequence[Any]:
    """All but the first step, which warms up, of more than three."""
    return found[1:] if len(found) > 3 else found


def _mean_split(found: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    return {key: fmean(parts[key] for _, parts in found) for key in ALL_PARTS}


def _bins(found: Sequence[tuple[int, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    """At most `MAX_BARS` bars; with more steps, each bar is a mean of neighbouring steps."""
    width = math.ceil(len(found) / MAX_BARS)
    groups = [found[start : start + width] for start in range(0, len(found), width)]
    return [
        (str(group[0][0]) if len(group) == 1 else f"{group[0][0]}–{group[-1][0]}", _mean_split(group))
        for group in groups
    ]


def _step_chart(
    record: RunRecord, number_of_run: int, bins: list[tuple[str, dict[str, float]]], high: float
) -> BarChart:
    of = "" if len(bins) == len(record.lines) else ", means of neighbouring steps"
    return BarChart(
        f"steps-{number_of_run}",
        f"Step time: {record.name}{of}",
        STEP_AXIS,
        "seconds",
        [label for label, _ in bins],
        [Bars(label, [parts[key] for _, parts in bins], colour) for key, (label, colour) in ALL_PARTS.items()],
        stacked=True,
        high=high,
    )


def utilization_section(records: Sequence[RunRecord]) -> Section:
    """What share of its time each rank does useful work (the paper's Figure 5)."""
    section = Section(
        "utilization",
        "Utilisation of each rank",
        "Share of the time after the first step in which a rank decodes, scores or updates, from the trace (Figure 5 of the "
        "OPPO paper). Waiting, messages and the exchange of scores count as idle.",
    )
    rows = []
    for record in records:
        try:
            found = shares([(record.name, record.spans)]) if record.spans else []
        except DataError:
            found = []
        if not found:
            section.lacks(record, "utilisation", record.no_spans or "its trace has no work of any step")
        rows += [(f"{record.name}{DOT}rank {row['rank']:.0f}", row) for row in found]
    if rows:
        section.charts.append(
            BarChart(
                "utilization",
                "Utilisation by rank; at the right: useful work",
                "rank",
                "% of the time",
                [name for name, _ in rows],
                [Bars(use, [max(0.0, row[use]) for _, row in rows], colour) for use, colour in USES.items()],
                stacked=True,
                horizontal=True,
                ends=[f"{100 - row['idle']:.0f} %" for _, row in rows],
            )
        )
    return section


def memory_section(records: Sequence[RunRecord]) -> Section:
    """What each rank has held at most."""
    section = Section(
        "memory",
        "Memory",
        "The most that each rank's process has held up to the end of each step (CPU: resident set; CUDA: torch's allocator), "
        "and how it compares with what `oppo train --dry-run` plans.",
    )
    for i, record in enumerate(records):
        peaks = [(line["step"], found) for line in record.lines if (found := memory_peaks(line))]
        if peaks:
            title = f"Peak memory by rank: {record.name}"
            lines = _rank_lines(peaks)
            section.charts.append(LineChart(f"memory-{i}", title, STEP_AXIS, "MiB", lines, from_zero=True))
        else:
            section.lacks(record, "memory of the ranks")
        if rows := _memory_rows(record.summary or {}):
            head = ["rank", "before models, MiB", "peak, MiB", "planned, MiB", "(peak - before) / planned"]
            section.tables.append(Table(record.name, head, rows, folded=len(rows) > MANY_RANKS))
        elif peaks and record.summary is None:
            section.missing.append(f"{record.name}: planned memory is compared when the run has ended.")
    return section


def memory_peaks(line: Mapping[str, Any]) -> list[float | None]:
    """MiB of each rank; None where the line has no number of it, no rank where it has none of any."""
    value = line.get("memory_peak_mb")
    peaks = [number({"peak": peak}, "peak") for peak in value] if isinstance(value, list) else []
    return peaks if any(peak is not None for peak in peaks) else []


def _is_list(value: object) -> TypeGuard[list[float | None]]:
    return isinstance(value, list) and bool(value)


def _rank_lines(peaks: Sequence[tuple[int, Sequence[float | None]]]) -> list[Line]:
    """A line a rank; of many ranks the most, the middle and the least."""
    steps = [step for step, _ in peaks]
    count = max(len(ranks) for _, ranks in peaks)
    if count <= MANY_RANKS:
        return [
            Line(
                f"rank {rank}",
                steps,
                [ranks[rank] if rank < len(ranks) else None for _, ranks in peaks],
                run_colour(rank),
            )
            for rank in range(count)
        ]
    known = [[value for value in ranks if value is not None] or [0.0] for _, ranks in peaks]
    most = Line("most of all ranks", steps, [max(ranks) for ranks in known], run_colour(0))
    middle = Line("median", steps, [median(ranks) for ranks in known], run_colour(1))
    return [most, middle, Line("least", steps, [min(ranks) for ranks in known], run_colour(2))]


def _memory_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    keys = ("memory_base_mb", "memory_peak_mb", "memory_planned_mb", "memory_ratio")
    columns: list[list[float | None]] = [column for key in keys if _is_list(column := summary.get(key))]
    if len(columns) < len(keys):
        return []
    return [
        [str(rank), *(_figure(value) for value in values)] for rank, values in enumerate(zip(*columns, strict=False))
    ]


def _figure(value: object) -> str:
    known = number({"value": value}, "value")
    return "–" if known is None else short(round(known, 2))
