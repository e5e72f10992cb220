"""Figures from the metrics of several runs of one configuration, and tables of figures as text.

Seconds are medians over the *steady* steps, those after the first, of all runs; shares are ratios of sums over the same
steps; totals are over all steps of a run.  Inter-step overlap moves work from a step to the one before, so that its first
step is longer and its last ones shorter than the median: over the same prompts with the same (forced) lengths only the
total compares equal work to the token.  The total holds the warm-up of the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oppo_megatron.bench.suite import Lines

SECONDS = ("step_s", "decode_s", "score_exposed_s", "score_busy_s", "critic_exposed_s", "critic_update_s", "train_s")


def figures(runs: Sequence[Lines]) -> dict[str, Any]:
    """The figures of some runs.  None where a field is not among the metrics."""
    lines = steady(runs)
    return {
        **{name: median_of(lines, name) for name in SECONDS},
        "score_exposed_percent": share(lines, "score_exposed_s", "score_busy_s"),
        "critic_exposed_percent": share(lines, "critic_exposed_s", "critic_update_s"),
        "idle_actor_s": median(line["idle_s"]["actor"] for line in lines),
        "idle_scorer_s": median(line["idle_s"]["scorer"] for line in lines),
        "tokens_per_s": sum(line["tokens"] for line in lines) / sum(line["step_s"] for line in lines),
        "total_s": median(sum(line["step_s"] for line in run) for run in runs),
        "tokens": [sum(line["tokens"] for line in run) for run in runs],
        "step_s_by_run": [[line["step_s"] for line in run] for run in runs],
    }


def steady(runs: Sequence[Lines]) -> list[Mapping[str, Any]]:
    """The steps after the first of all runs; the first, too, where a run has no other."""
    return [line for run in runs for line in (run[1:] or run)]


def median_of(lines: Lines, name: str) -> float | None:
    """Median of a field over the lines that have it."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return median(values) if values else None


def mean_of(lines: Lines, name: str) -> float | None:
    """Mean of a field over the lines that have it."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return fmean(values) if values else None


def share(lines: Lines, part: str, whole: str) -> float | None:
    """The sum of `part` in percent of that of `whole`, over the lines that have both."""
    both = [line for line in lines if line.get(part) is not None and line.get(whole) is not None]
    total = sum(line[whole] for line in both)
    return 100 * sum(line[part] for line in both) / total if total else None


def speedups(row: Mapping[str, Any], base: Mapping[str, Any] | None, name: str) -> dict[str, float | None]:
    """How many times as long `base` takes, by the median step and by the total; None without a base."""
    return {
        f"{name}_{seconds}": None if base is None else base[seconds] / row[seconds] for seconds in ("step_s", "total_s")
    }


def format_table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Aligned text: `columns` maps each heading to the key of its values.  A value that is missing or None is a dash.

    Two decimals, none from 100 on; a small value that would be shown as 0.00 has its first digit instead.
    """
    cells = [list(columns), *([_cell(row.get(key)) for key in columns.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(_cell(item) for item in value)
    if isinstance(value, float):
        if abs(value) >= 100:
            return f"{value:.0f}"
        return f"{value:.1g}" if 0 < abs(value) < 0.005 else f"{value:.2f}"
    return str(value)
