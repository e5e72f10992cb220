"""The sections of the page about the course of training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from oppo_megatron.report.charts import BarChart, Bars, Line, LineChart, Style, short
from oppo_megatron.report.colours import run_colour
from oppo_megatron.report.page import Section, Table
from oppo_megatron.report.plots import moving_mean
from oppo_megatron.report.run_records import RunRecord, number

QUARTERS = {"q1": "shortest quarter", "q2": "second quarter", "q3": "third quarter", "q4": "longest quarter"}
LENGTHS: dict[str, tuple[str, Style]] = {
    "trained_len_mean": ("trained, mean", "plain"),
    "submitted_len_mean": ("submitted, mean", "dashed"),
    "trained_len_max": ("trained, longest", "dotted"),
}
GAPS: dict[str, tuple[str, Style]] = {"length_gap": ("", "plain"), "group_length_gap": (", within groups", "dashed")}
"""What stands behind the run's name."""
MAX_DECISIONS = 300
CURVE_NOTES = {
    "reward": "Healthy: it rises, then levels off, with the KL below still small. A sudden rise together with KL or response "
    "length is a weakness of the reward that was found; a fall is an update that went too far, or a critic that lags.",
    "loss": "Healthy: it falls fast, then slowly. A step down at each new epoch means rows learned by heart; peaks or a rise "
    "mean a learning rate that is too high.",
}
STEP_AXIS, SECONDS_AXIS = "PPO step", "seconds since the start"


def curves(record: RunRecord, key: str, x_key: str, number_of_run: int) -> list[Line]:
    """What was measured, faint, and its moving mean over a tenth of the steps."""
    known = [(line["step"] if x_key == "step" else number(line, x_key), number(line, key)) for line in record.lines]
    points = [(x, y) for x, y in known if x is not None and y is not None]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    colour = run_colour(number_of_run)
    smooth = moving_mean(ys, window=max(1, len(ys) // 10))
    return [Line(record.name, xs, ys, colour, "faint"), Line(record.name, xs, smooth, colour)]


def reward_section(records: Sequence[RunRecord]) -> Section:
    """Reward, or the loss of supervised runs, against steps and seconds, the runs side by side."""
    section = Section(
        "reward",
        "Reward",
        "Mean score of each step's trained responses, before clipping and without KL penalty. Faint: as measured; "
        "strong: moving mean over a tenth of the steps.",
    )
    for key, label, kind in (("reward_mean", "mean reward", "train"), ("loss", "loss (nats)", "supervised")):
        shown = [(i, record) for i, record in enumerate(records) if record.has(key)]
        for i, record in enumerate(records):
            if record.kind == kind and (i, record) not in shown:
                section.lacks(record, "reward" if kind == "train" else "loss")
            elif record.kind == "supervised" and kind == "train":
                section.lacks(record, "reward")
        if shown:
            word = "reward" if kind == "train" else "loss"
            for x_key, axis, suffix in (("step", STEP_AXIS, "steps"), ("time_s", SECONDS_AXIS, "seconds")):
                axis = "training step" if kind == "supervised" and x_key == "step" else axis
                lines = [line for i, record in shown for line in curves(record, key, x_key, i)]
                title = f"{word.capitalize()} against {suffix}"
                section.charts.append(LineChart(f"{word}-{suffix}", title, axis, label, lines, note=CURVE_NOTES[word]))
    return section


def deferral_section(records: Sequence[RunRecord]) -> Section:
    """How often trained responses were carried over a step (the paper's Table 2)."""
    section = Section(
        "deferrals",
        "Deferrals",
        "How many steps a trained response was carried over before it was trained, as a share of all trained responses "
        "(Table 2 of the OPPO paper: 78.48 %, 20.20 %, 0.23 %, 1.05 % for 0 to 3; mean 0.24).",
    )
    counts = {}
    for i, record in enumerate(records):
        if total := deferred_counts(record.lines):
            counts[i] = total
        else:
            section.lacks(record, "deferrals")
    if not counts:
        return section
    times = range(1 + max(max(total) for total in counts.values()))
    share = {i: [100 * total[k] / sum(total.values()) for k in times] for i, total in counts.items()}
    section.charts.append(
        BarChart(
            "deferrals",
            "Trained responses by times deferred",
            "times deferred",
            "% of trained responses",
            [str(k) for k in times],
            [Bars(records[i].name, values, run_colour(i)) for i, values in share.items()],
        )
    )
    rows = []
    for i, total in counts.items():
        mean = sum(k * count for k, count in total.items()) / sum(total.values())
        rows.append([records[i].name, *(f"{value:.2f} %" for value in share[i]), f"{mean:.2f}"])
    section.tables.append(Table("", ["deferred steps", *(str(k) for k in times), "mean"], rows))
    return section


def deferred_counts(lines: Sequence[Mapping[str, Any]]) -> Counter[int]:
    """How many trained responses were carried over 0, 1, 2 ... steps."""
    total: Counter[int] = Counter()
    for line in lines:
        deferred = line.get("deferred")
        if not isinstance(deferred, Mapping):
            continue
        for times in deferred:
            count = number(deferred, times)
            if times.isdecimal() and count is not None and count > 0:
                total[int(times)] += int(count)
    return total


def control_section(records: Sequence[RunRecord]) -> Section:
    """Delta and chunk size, with the controllers' reasons."""
    section = Section(
        "control",
        "Delta and chunk size",
        "How many sequences beyond the batch are decoded (Δ), and how many decode steps a chunk has. The reasons that the "
        "controllers gave are shown where the pointer is, and listed below where they changed something.",
    )
    kinds = (("delta", "Δ", "Δ (sequences)"), ("chunk_tokens", "Chunk size", "chunk (decode steps)"))
    for key, title, label in kinds:
        lines = []
        for i, record in enumerate(records):
            if not record.has(key):
                section.lacks(record, "Δ" if key == "delta" else "chunk size")
                continue
            steps, values = record.column(key)
            notes = [str(line.get(f"{key.split('_')[0]}_reason") or "") for line in record.lines]
            lines.append(Line(record.name, steps, values, run_colour(i), "stepped", notes))
        if lines:
            name = key.split("_")[0]
            section.charts.append(LineChart(name, f"{title} by step", STEP_AXIS, label, lines, from_zero=True))
    for record in records:
        if rows := _decisions(record):
            cut = f", the last {MAX_DECISIONS}" if len(rows) > MAX_DECISIONS else ""
            head = ["step", "what", "change", "reason"]
            changes = "1 change and its reason" if len(rows) == 1 else f"{len(rows)} changes and their reasons"
            title = f"{record.name}: {changes}{cut}"
            section.tables.append(Table(title, head, rows[-MAX_DECISIONS:], folded=True))
    return section


def _decisions(record: RunRecord) -> list[list[str]]:
    """The steps at whose end a controller changed its value."""
    rows = []
    for line, after in zip(record.lines, record.lines[1:], strict=False):
        for key, label in (("delta", "Δ"), ("chunk_tokens", "chunk")):
            old, new = number(line, key), number(after, key)
            if old is not None and new is not None and old != new:
                reason = str(line.get(f"{key.split('_')[0]}_reason") or "no reason was recorded")
                rows.append([str(line["step"]), label, f"{short(old)} → {short(new)}", reason])
    return rows


def length_section(records: Sequence[RunRecord]) -> Section:
    """Lengths of what was trained against what was submitted."""
    section = Section(
        "lengths",
        "Trained and submitted lengths",
        "Overcommitment trains the responses that finish first. Submitted: those and the carried ones with the tokens they "
        "have so far, a lower bound. The gap is 1 - trained / submitted: above 0, the trained ones are shorter. Within groups: "
        "1 - mean / longest of the responses to a prompt, whose last one a group waits for.",
    )
    gaps = []
    for i, record in enumerate(records):
        if not record.has("trained_len_mean"):
            section.lacks(record, "lengths")
            continue
        lines = [
            Line(label, *record.column(key), colour=run_colour(i), style=style)
            for key, (label, style) in LENGTHS.items()
            if record.has(key)
        ]
        title = f"Response lengths: {record.name}"
        section.charts.append(LineChart(f"lengths-{i}", title, STEP_AXIS, "response tokens", lines, from_zero=True))
        for key, (label, style) in GAPS.items():
            if not record.has(key):
                continue
            steps, values = record.column(key)
            percent = [None if value is None else 100 * value for value in values]
            gaps.append(Line(f"{record.name}{label}", steps, percent, run_colour(i), style))
    if gaps:
        title = "Gaps between lengths: trained and submitted, within groups"
        section.charts.append(LineChart("length-gap", title, STEP_AXIS, "gap (%)", gaps))
    return section


def length_bin_section(records: Sequence[RunRecord]) -> Section:
    """Reward of the shorter and the longer responses."""
    section = Section(
        "bins",
        "Reward by length",
        "Mean reward of each quarter of a batch by response length: does the reward fall, or rise, with length?",
    )
    means, lengths = [], []
    for i, record in enumerate(records):
        present = [quarter for quarter in QUARTERS if record.has(f"reward_by_quarter.{quarter}")]
        if not present:
            section.lacks(record, "reward by length")
            continue
        rewards = [_mean_of(record, f"reward_by_quarter.{quarter}") for quarter in QUARTERS]
        means.append(Bars(record.name, rewards, run_colour(i)))
        tokens = [_mean_of(record, f"length_by_quarter.{quarter}") for quarter in QUARTERS]
        lengths.append([record.name, *("–" if value is None else short(round(value, 1)) for value in tokens)])
        lines = [_quarter(record, quarter, run_colour(k)) for k, quarter in enumerate(QUARTERS) if quarter in present]
        title = f"Reward by length over the steps: {record.name}"
        section.charts.append(LineChart(f"bins-{i}", title, STEP_AXIS, "mean reward (moving mean)", lines))
    if means:
        section.charts.insert(
            0,
            BarChart(
                "bins",
                "Reward by length, mean of all steps",
                "quarter of the batch, by response length",
                "mean reward",
                list(QUARTERS.values()),
                means,
            ),
        )
        section.tables.append(Table("", ["mean response tokens", *QUARTERS.values()], lengths))
    return section


def _mean_of(record: RunRecord, key: str) -> float | None:
    values = [value for value in record.column(key)[1] if value is not None]
    return sum(values) / len(values) if values else None


def _quarter(record: RunRecord, quarter: str, colour: str) -> Line:
    steps, values = record.column(f"reward_by_quarter.{quarter}")
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    smooth = moving_mean([value for _, value in known], window=max(1, len(known) // 10))
    return Line(QUARTERS[quarter], [step for step, _ in known], smooth, colour)
