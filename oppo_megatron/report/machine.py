"""The report's sections on time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from oppo_megatron.errors import DataError
from oppo_megatron.report.charts import COLOURS, MAX_ROWS, BarChart, Bars, Line, LineChart, rows_chart, run_colour, short
from oppo_megatron.report.page import Section, Table
from oppo_megatron.report.run_records import ALL_PARTS, RunRecord, memory_peaks, number, split_step
from oppo_megatron.report.timeline import KINDS, Timeline, shares, step_bounds, step_window, waits

MAX_BARS = 120
MANY_ROWS = 12
USES = (*KINDS, "idle")


def step_section(records: Sequence[RunRecord]) -> Section:
    section = Section(
        "steps",
        "Where a step's time goes",
        "Seconds of each step on the actor's output rank. Exposed scoring: not hidden by other work. Idle and other: waits "
        "for the pipeline and for other ranks, planning, logs.",
    )
    splits: dict[int, list[tuple[int, dict[str, float]]]] = {}
    for i, record in enumerate(records):
        found = [(line["step"], split_step(line)) for line in record.lines if number(line, "step_s") is not None]
        if record.kind == "supervised" or not found:
            section.lacks(record, "split of the step time")
        else:
            splits[i] = found
    if not splits:
        return section
    means = {records[i].name: _mean_split(steady(found)) for i, found in splits.items()}
    left_out = ", first step left out" if any(len(steady(found)) < len(found) for found in splits.values()) else ""
    bars = [(name, mean, f"{sum(mean.values()):.3g} s") for name, mean in means.items()]
    section.charts.append(rows_chart("steps-mean", f"Mean step{left_out}", "run", "seconds per step", bars, ALL_PARTS))
    binned = {i: _bins(found) for i, found in splits.items()}
    high = max(sum(parts.values()) for bins in binned.values() for _, parts in bins)
    for i, bins in binned.items():
        columns = [Bars(label, [parts[k] for _, parts in bins], colour) for k, (label, colour) in ALL_PARTS.items()]
        title = f"Step time: {records[i].name}{', means of neighbouring steps' if len(bins) < len(splits[i]) else ''}"
        categories = [label for label, _ in bins]
        section.charts.append(BarChart(f"steps-{i}", title, "PPO step", "seconds", categories, columns, stacked=True, high=high))
    rows = []
    for name, mean in means.items():
        total = sum(mean.values()) or 1.0
        rows.append([name, *(f"{mean[key]:.3g} s ({100 * mean[key] / total:.0f} %)" for key in ALL_PARTS)])
    section.tables.append(Table("", ["mean of a step", *(label for label, _ in ALL_PARTS.values())], rows))
    return section


def steady(found: Sequence[Any]) -> Sequence[Any]:
    """Leave out the first of more than three steps."""
    return found[1:] if len(found) > 3 else found


def _mean_split(found: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    return {key: fmean(parts[key] for _, parts in found) for key in ALL_PARTS}


def _bins(found: Sequence[tuple[int, dict[str, float]]]) -> list[tuple[str, dict[str, float]]]:
    """At most `MAX_BARS` bars, means of neighbouring steps."""
    width = math.ceil(len(found) / MAX_BARS)
    groups = [found[start : start + width] for start in range(0, len(found), width)]
    return [(f"{each[0][0]}–{each[-1][0]}" if len(each) > 1 else str(each[0][0]), _mean_split(each)) for each in groups]


def timeline_section(records: Sequence[RunRecord], steps: Sequence[int] = ()) -> Section:
    section = Section(
        "timeline",
        "Timeline of a step",
        "Work of each rank for each role, in the step of median length (or of `--step`). Paler: work of another step. For "
        "all steps, open the run's trace.json in Perfetto (ui.perfetto.dev).",
    )
    bounds = {record.name: step_bounds(record.spans) for record in records}
    for step in steps or (None,):
        windows = {}
        for record in records:
            if bounds[record.name] and (step is None or step in bounds[record.name]):
                windows[record.name] = step_window(record.name, record.spans, step)
        if windows:
            section.charts.append(Timeline("timeline" if step is None else f"timeline-{step}", windows))
    for record in records:
        if not bounds[record.name]:
            section.missing.append(f"{record.name}: no timeline ({record.no_spans or 'its trace has no work of any step'}).")
    if section.charts:
        head, rows = ["who waits", "share of the step", "for what"], []
        for name, window in windows.items():
            for (rank, role), kinds in waits(window).items():
                text = ", ".join(f"{kind} {s:.3g} s" for kind, s in sorted(kinds.items(), key=lambda each: -each[1]))
                share = 100 * sum(kinds.values()) / window.seconds
                rows.append([f"{name}, rank {rank} {role}", f"{share:.0f} %", text or "–"])
        section.tables.append(Table("Waits", head, rows, folded=len(rows) > MANY_ROWS))
    return section


def utilization_section(records: Sequence[RunRecord]) -> Section:
    section = Section(
        "utilization",
        "Utilisation of each rank",
        "Share of the time after the first step that a rank spends on decoding, scoring or updates, from the trace (Figure 5 of "
        "the OPPO paper). Waiting, messages and the exchange of scores count as idle.",
    )
    rows: list[tuple[str, dict[str, float]]] = []
    means: list[tuple[str, dict[str, float]]] = []
    for record in records:
        found = utilization_of(record)
        if not found:
            section.lacks(record, "utilisation", record.no_spans or "its trace has no work of any step")
        rows += [(f"{record.name} \N{MIDDLE DOT} rank {row['rank']:.0f}", row) for row in found]
        means += [(f"{record.name} \N{MIDDLE DOT} {name}, mean", row) for name, row in pools(found).items()]
    title = "Utilisation by rank; at the right: useful work"
    if len(rows) > MAX_ROWS:
        title = f"Utilisation, the {MAX_ROWS} least used of {len(rows)} ranks; at the right: useful work"
        rows = sorted(rows, key=lambda row: -row[1]["idle"])[:MAX_ROWS]
    if rows:
        section.charts.append(utilization_chart(title, [*means, *rows]))
    return section


def utilization_chart(title: str, ranks: Sequence[tuple[str, Mapping[str, float]]]) -> BarChart:
    """Chart named rows of `shares`."""
    rows = [(name, row, f"{100 - row['idle']:.0f} %") for name, row in ranks]
    uses = {use: (use, COLOURS[use]) for use in USES}
    return rows_chart("utilization", title, "rank", "% of the time after the first step", rows, uses)


def utilization_of(record: RunRecord) -> list[dict[str, float]]:
    try:
        return shares([(record.name, record.spans)]) if record.spans else []
    except DataError:
        return []


def pools(ranks: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Mean shares of the ranks that decode, of those that score, and of those that only train; empty if all do the same."""
    found: dict[str, list[Mapping[str, float]]] = {}
    for row in ranks:
        kind = next((kind for kind in ("decode", "score") if row[kind]), "update")
        found.setdefault(f"ranks that {kind}", []).append(row)
    return {name: {use: fmean(row[use] for row in own) for use in USES} for name, own in found.items() if len(found) > 1}


def memory_section(records: Sequence[RunRecord]) -> Section:
    section = Section(
        "memory",
        "Memory",
        "Peak of each rank's process up to the end of each step (CPU: resident set; CUDA: torch's allocator), for the fullest "
        "and the emptiest rank; and by rank against the plan of `oppo train --dry-run`.",
    )
    lines = []
    for i, record in enumerate(records):
        peaks = [(line["step"], [p for p in found if p is not None]) for line in record.lines if (found := memory_peaks(line))]
        if peaks:
            steps, ranks = [step for step, _ in peaks], [values for _, values in peaks]
            lines.append(Line(f"{record.name}, fullest rank", steps, [max(each) for each in ranks], run_colour(i)))
            least = [min(each) for each in ranks]
            lines.append(Line(f"{record.name}, emptiest rank", steps, least, run_colour(i), "dashed"))
        else:
            section.lacks(record, "memory of the ranks")
        summary = record.summary or {}
        keys = ("memory_base_mb", "memory_peak_mb", "memory_planned_mb", "memory_ratio")
        columns = [column for key in keys if isinstance(column := summary.get(key), list) and column]
        if len(columns) == len(keys):
            rows = [[str(rank), *(_figure(value) for value in values)] for rank, values in enumerate(zip(*columns, strict=False))]
            head = ["rank", "before models, MiB", "peak, MiB", "planned, MiB", "(peak - before) / planned"]
            section.tables.append(Table(record.name, head, rows, folded=len(rows) > MANY_ROWS))
        elif peaks and record.summary is None:
            section.missing.append(f"{record.name}: planned memory is compared when the run has ended.")
    if lines:
        section.charts.append(LineChart("memory", "Peak memory", "PPO step", "MiB", lines, from_zero=True))
    return section


def _figure(value: object) -> str:
    known = number({"value": value}, "value")
    return "–" if known is None else short(round(known, 2))
