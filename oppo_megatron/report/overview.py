"""The tables at the top of the page: figures of the runs side by side, and their differing settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oppo_megatron.clock import format_duration
from oppo_megatron.report.charts import short
from oppo_megatron.report.page import Section, Table
from oppo_megatron.report.progress import deferred_counts
from oppo_megatron.report.run_records import RunRecord, number
from oppo_megatron.rundir.metrics_log import summarise

Form = Callable[[Any], str]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _reward(value: float) -> str:
    return f"{value:.3f}"


FIGURES: dict[str, tuple[str, Form]] = {
    "step_s": ("seconds a step", _seconds),
    "scoring_hidden": ("scoring time hidden", _percent),
    "tokens_per_s": ("tokens a second", short),
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
    """Figures by run: times leave out the first step, which warms up."""
    section = Section(
        "overview",
        "Overview",
        "Mean times of more than three steps leave out the first, which warms up. First and last steps: a tenth of the "
        "steps, at least three.",
    )
    figures = [_figures(record) for record in records]
    rows = [
        ["state", *(state(record) for record in records)],
        ["steps done", *(steps_done(record) for record in records)],
    ]
    for key, (label, form) in FIGURES.items():
        values = [figure.get(key) for figure in figures]
        if any(isinstance(value, int | float) for value in values):
            rows.append([label, *(form(value) if isinstance(value, int | float) else "–" for value in values)])
    if any(bests := [_best(figure.get("best")) for figure in figures]):
        rows.append(["best step, held out", *(best or "–" for best in bests)])
    section.tables.append(Table("", ["", *(record.name for record in records)], rows))
    if len(records) > 1:
        section.tables += _differences(records)
    return section


def _best(found: Any) -> str:
    """The step and its figure, as the summary names them; nothing where it names none."""
    if not isinstance(found, Mapping) or not isinstance(found.get("value"), int | float):
        return ""
    return f"{found.get('step')} ({found.get('metric')} {found['value']:.4g})"


def _figures(record: RunRecord) -> dict[str, Any]:
    """The figures of the summary, or of the steps until there is one; supervised ones call the total `time_s`."""
    figures = {**summarise([_plain(line) for line in record.lines]), **(record.summary or {})}
    return {"total_s": figures.get("time_s"), **figures}


def _plain(line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line that are what they should be: numbers, and the counts of deferrals."""
    plain: dict[str, Any] = {key: number(line, key) for key in line}
    counts = deferred_counts([line])
    return plain | {"deferred": {str(k): n for k, n in counts.items()}, "skipped": line.get("skipped")}


def state(record: RunRecord) -> str:
    """Whether the run has ended."""
    if record.summary is not None:
        return "finished"
    return "not finished: it goes on, or was ended early" if record.lines else "no step has ended yet"


def steps_done(record: RunRecord) -> str:
    """The number of the last step, and of how many where the configuration says it."""
    done = str(record.lines[-1]["step"]) if record.lines else "0"
    total = record.config.get("steps")
    return f"{done} of {total}" if isinstance(total, int) and str(total) != done else done


def _differences(records: Sequence[RunRecord]) -> list[Table]:
    """The settings that are not the same in all runs, of the sections that more than one of them has: those that another
    command alone has are no difference.
    """
    sections = Counter(name for record in records for name in record.config)
    shared = [{name: value for name, value in record.config.items() if sections[name] > 1} for record in records]
    flat = [dict(_flat(settings)) for settings in shared]
    keys = sorted({key for settings in flat for key in settings} - {"run_dir"})
    rows = []
    for key in keys:
        values = [settings.get(key, "–") for settings in flat]
        if len(set(values)) > 1:
            rows.append([key, *values])
    title = "Settings in which the runs differ"
    return (
        [Table(title, ["setting", *(record.name for record in records)], rows, folded=len(rows) > 12)] if rows else []
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", str(value)))
    return found
