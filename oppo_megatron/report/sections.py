"""`oppo report`: turns run directories into a page and its pictures, with sections on the course of a run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from oppo_megatron.clock import ByTime, format_duration
from oppo_megatron.errors import DataError
from oppo_megatron.report.charts import BarChart, Bars, draw, png, run_colour, short
from oppo_megatron.report.curves import (
    BINS,
    CONTROL,
    LENGTHS,
    LOSS,
    QUARTERS,
    REWARD,
    Curve,
    curve_chart,
    heldout_section,
    learning_section,
)
from oppo_megatron.report.machine import memory_section, step_section, timeline_section, utilization_section
from oppo_megatron.report.page import HEADING, Section, Table, render
from oppo_megatron.report.run_records import RunRecord, deferred_counts, number, read_runs, sample_responses
from oppo_megatron.report.timeline import Timeline, draw_windows, step_bounds
from oppo_megatron.rundir.directory import write_text
from oppo_megatron.rundir.metrics_log import summarise

MAX_CHANGES = 300
MANY_ROWS = 12


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


_reward = "{:.3f}".format
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "step_s": ("seconds per step", "{:.3g} s".format),
    "scoring_hidden": ("scoring time hidden", _percent),
    "tokens_per_s": ("tokens per second", short),
    "reward_first": ("reward, first steps", _reward),
    "reward_last": ("reward, last steps", _reward),
    "loss_first": ("loss, first steps", _reward),
    "loss_last": ("loss, last steps", _reward),
    "accuracy_before": ("held-out accuracy before", _percent),
    "accuracy_after": ("held-out accuracy after", _percent),
    "skipped_steps": ("steps skipped by a guard", short),
    "rollbacks": ("rollbacks", short),
    "total_s": ("total time", format_duration),
}


def overview(records: Sequence[RunRecord]) -> Section:
    section = Section(
        "overview",
        "Overview",
        "Mean times of more than three steps leave out the first, which warms up. First and last steps: a tenth of the "
        "steps, at least three.",
    )
    figures = [_figures(record) for record in records]
    rows = [["state", *map(_state, records)], ["steps done", *map(_steps_done, records)]]
    for key, (label, form) in FIGURES.items():
        values = [figure.get(key) for figure in figures]
        if any(isinstance(value, int | float) for value in values):
            rows.append([label, *(form(value) if isinstance(value, int | float) else "–" for value in values)])
    bests = [""] * len(figures)
    for place, best in enumerate(figure.get("best") for figure in figures):
        if isinstance(best, Mapping) and isinstance(best.get("value"), int | float):
            bests[place] = f"{best.get('step')} ({best.get('metric')} {best['value']:.4g})"
    if any(bests):
        rows.append(["best step, held out", *(best or "–" for best in bests)])
    head = ["", *(record.name for record in records)]
    section.tables.append(Table("", head, rows))
    if differences := _differences(records):
        folded = len(differences) > MANY_ROWS
        section.tables.append(Table("Settings that differ", ["setting", *head[1:]], differences, folded=folded))
    return section


def _figures(record: RunRecord) -> dict[str, Any]:
    """Figures of the summary, or of the steps so far."""
    lines: list[dict[str, Any]] = []
    for line in record.lines:  # fields of a wrong type count as missing
        deferred = {str(times): count for times, count in deferred_counts([line]).items()}
        lines.append({key: number(line, key) for key in line} | {"deferred": deferred, "skipped": line.get("skipped")})
    figures = {**summarise(lines), **(record.summary or {})}
    return {"total_s": figures.get("time_s"), **figures}


def _state(record: RunRecord) -> str:
    if record.summary is not None:
        return "finished"
    return "not finished: still running, or ended early" if record.lines else "no step has ended yet"


def _steps_done(record: RunRecord) -> str:
    done, total = str(record.lines[-1]["step"]) if record.lines else "0", record.config.get("steps")
    return f"{done} of {total}" if isinstance(total, int) and str(total) != done else done


def _differences(records: Sequence[RunRecord]) -> list[list[str]]:
    """A row per differing setting, without sections of one run only."""
    sections = Counter(name for record in records for name in record.config)
    flat = [dict(_flat({name: value for name, value in record.config.items() if sections[name] > 1})) for record in records]
    keys = sorted({key for settings in flat for key in settings} - {"run_dir"})
    rows = [[key, *(settings.get(key, "–") for settings in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _add_curves(section: Section, records: Sequence[RunRecord], curves: Sequence[Curve], *names: str) -> None:
    """Add charts; `names` of the first curves are for the list of missing ones."""
    for curve, name in zip_longest(curves, names):
        for record in records:
            if name is not None and not any(record.has(key) for key in curve.fields):
                section.lacks(record, name)
        if (chart := curve_chart(records, curve)) is not None:
            section.charts.append(chart)


def reward_section(records: Sequence[RunRecord]) -> Section:
    section = Section(
        "reward",
        "Reward",
        "Mean score of each step's trained responses, before clipping and without KL penalty. Faint: as measured; strong: "
        "moving mean over a tenth of the steps.",
    )
    _add_curves(section, records, REWARD, "reward")
    _add_curves(section, [record for record in records if record.kind == "supervised"], LOSS, "loss")
    return section


def deferral_section(records: Sequence[RunRecord]) -> Section:
    section = Section(
        "deferrals",
        "Deferrals",
        "Number of steps a trained response was carried over, as a share of all trained responses (Table 2 of the OPPO "
        "paper: 78.48 %, 20.20 %, 0.23 %, 1.05 % for 0 to 3; mean 0.24).",
    )
    counts = {i: total for i, record in enumerate(records) if (total := deferred_counts(record.lines))}
    for i, record in enumerate(records):
        if i not in counts:
            section.lacks(record, "deferrals")
    if not counts:
        return section
    times = range(1 + max(max(total) for total in counts.values()))
    percent = {i: [100 * total[k] / sum(total.values()) for k in times] for i, total in counts.items()}
    bars = [Bars(records[i].name, values, run_colour(i)) for i, values in percent.items()]
    title, label = "Trained responses by times deferred", "% of trained responses"
    section.charts.append(BarChart("deferrals", title, "times deferred", label, [str(k) for k in times], bars))
    means = {i: sum(k * count for k, count in total.items()) / sum(total.values()) for i, total in counts.items()}
    rows = [[records[i].name, *(f"{each:.2f} %" for each in percent[i]), f"{means[i]:.2f}"] for i in counts]
    section.tables.append(Table("", ["deferred steps", *(str(k) for k in times), "mean"], rows))
    return section


def control_section(records: Sequence[RunRecord]) -> Section:
    section = Section(
        "control",
        "Delta and chunk size",
        "Sequences decoded beyond the batch (Δ), and decode steps per chunk; below, each change with the controller's reason.",
    )
    _add_curves(section, records, CONTROL, "Δ", "chunk size")
    for record in records:
        rows = []
        for line, after in zip(record.lines, record.lines[1:], strict=False):
            for key, label, reason in (("delta", "Δ", "delta_reason"), ("chunk_tokens", "chunk", "chunk_reason")):
                old, new = number(line, key), number(after, key)
                if old is not None and new is not None and old != new:
                    why = str(line.get(reason) or "no reason was recorded")
                    rows.append([str(line["step"]), label, f"{short(old)} → {short(new)}", why])
        if rows:
            cut = f", the last {MAX_CHANGES}" if len(rows) > MAX_CHANGES else ""
            title = f"{record.name}: {len(rows)} change{'s' * (len(rows) > 1)}{cut}"
            head = ["step", "what", "change", "reason"]
            section.tables.append(Table(title, head, rows[-MAX_CHANGES:], folded=True))
    return section


def length_section(records: Sequence[RunRecord]) -> Section:
    section = Section(
        "lengths",
        "Trained and submitted lengths",
        "Overcommitment trains the responses that finish first. Submitted: those and the carried ones with their tokens so "
        "far, a lower bound. The gap is 1 - trained / submitted: above 0, trained responses are shorter. Within groups: "
        "1 - mean / longest of the responses to a prompt; a group waits for its longest one.",
    )
    _add_curves(section, records, LENGTHS, "lengths")
    return section


def length_bin_section(records: Sequence[RunRecord]) -> Section:
    section = Section(
        "bins",
        "Reward by length",
        "Mean reward of each quarter of a batch by response length: does the reward fall or rise with length?",
    )
    bars, lengths = [], []
    for i, record in enumerate(records):
        rewards = [_mean_of(record, f"reward_by_quarter.{quarter}") for quarter in QUARTERS]
        if all(reward is None for reward in rewards):
            section.lacks(record, "reward by length")
            continue
        bars.append(Bars(record.name, rewards, run_colour(i)))
        tokens = [_mean_of(record, f"length_by_quarter.{quarter}") for quarter in QUARTERS]
        lengths.append([record.name, *("–" if value is None else short(round(value, 1)) for value in tokens)])
    if bars:
        title, category = "Reward by length, mean of all steps", "quarter of the batch, by response length"
        section.charts.append(BarChart("bins", title, category, "mean reward", list(QUARTERS.values()), bars))
        section.tables.append(Table("", ["mean response tokens", *QUARTERS.values()], lengths))
    _add_curves(section, records, [BINS])
    return section


def _mean_of(record: RunRecord, key: str) -> float | None:
    values = record.known(key)[1]
    return fmean(values) if values else None


def samples_section(records: Sequence[RunRecord]) -> Section:
    section = Section(
        "samples",
        "Sample responses",
        "From the first, the middle and the last step: the responses of lowest, middle and highest reward, and the longest.",
    )
    for record in records:
        rows, why = sample_responses(record)
        if rows:
            section.samples.append((record.name, rows))
        else:
            section.missing.append(f"{record.name}: no responses ({why}).")
    return section


PAGE = "index.html"


def write_report(
    paths: Sequence[str | os.PathLike[str]],
    out: Path,
    steps: Sequence[int] = (),
    *,
    pictures: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Write `index.html` and PNGs; return their paths.  `steps`: timelines (default: of median length).  Raises DataError."""
    page = out / PAGE
    if page.exists() and not (page.is_file() and HEADING in page.read_text(encoding="utf-8", errors="replace")):
        raise DataError(f"{page} exists and is not a report; name another folder with --out")
    records = read_runs(paths, progress)
    have = {step for record in records for step in step_bounds(record.spans)}
    for step in steps:
        if step not in have:
            known = f"steps {min(have)} to {max(have)}" if have else "no steps"
            raise DataError(f"--step {step}: the traces of these runs have {known}; name one of those")
    sections = make_sections(records, steps)
    charts = [chart for section in sections for chart in section.charts]
    images: dict[str, bytes] = {}
    by_time = ByTime(progress)
    for done, chart in enumerate(charts, start=1):
        by_time(f"drawing chart {done} of {len(charts)}")
        images[chart.name] = png(draw_windows(chart.windows) if isinstance(chart, Timeline) else draw(chart))
    out.mkdir(parents=True, exist_ok=True)
    write_text(page, render([record.name for record in records], sections, images))
    written = [page]
    for name, content in images.items() if pictures else ():
        written.append(out / f"{name}.png")
        written[-1].write_bytes(content)
    return written


def make_sections(records: Sequence[RunRecord], steps: Sequence[int] = ()) -> list[Section]:
    """Sections in order, without pictures."""
    return [
        overview(records),
        reward_section(records),
        heldout_section(records),
        learning_section(records),
        step_section(records),
        timeline_section(records, steps),
        utilization_section(records),
        deferral_section(records),
        control_section(records),
        length_section(records),
        length_bin_section(records),
        memory_section(records),
        samples_section(records),
    ]
