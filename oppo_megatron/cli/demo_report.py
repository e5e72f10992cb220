"""The demo's report: a table, two pictures, and `demo.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oppo_megatron.config.evaluation import ACCURACY
from oppo_megatron.nesting import read_json
from oppo_megatron.report.charts import draw
from oppo_megatron.report.comparison import format_table
from oppo_megatron.report.curves import REWARD, curve_chart
from oppo_megatron.report.run_records import read_runs
from oppo_megatron.report.timeline import draw_windows, step_window
from oppo_megatron.rundir.directory import RunDirectory, write_json

FIGURES = (
    "step_s", "scoring_hidden", "reward_first", "reward_last", "accuracy_before", "accuracy_after", "deferred",
)  # fmt: skip


def write_report(out: Path, names: Sequence[str], seconds: float, algorithm: str) -> None:
    """Write demo.json, reward.png and timeline.png of the runs `out/<name>`, the first without overlap."""
    runs = {name: RunDirectory(out / name) for name in names}
    figures = {name: _figures(run) for name, run in runs.items()}
    base, other = (figures[name]["step_s"] for name in names)
    lengths = read_json((out / "tokenizer" / "lengths.json").read_text(encoding="utf-8"))
    write_json(out / "demo.json", {"speedup": base / other, **figures, "solution_tokens": lengths})
    records = read_runs(list(runs.values()))
    if (reward := curve_chart(records, REWARD[0])) is not None:
        draw(reward).savefig(out / "reward.png")
    draw_windows({each.name: step_window(each.name, each.spans, None) for each in records}).savefig(out / "timeline.png")
    print(comparison(figures, base / other, algorithm))
    files = ", ".join(str(out / file) for file in ("reward.png", "timeline.png", "demo.json"))
    print(f"{files}; {seconds:.0f} s in all")


def comparison(figures: Mapping[str, Mapping[str, Any]], speedup: float, algorithm: str) -> str:
    """A column for each run, the first without overlap."""
    runs = list(figures.values())
    lines = {"seconds per step": [f"{run['step_s']:.2f}" for run in runs], "speed-up": ["1.00x", f"{speedup:.2f}x"]}
    if any(run["scoring_hidden"] is not None for run in runs):  # there is none without a scoring model
        lines["scoring time hidden"] = [f"{run['scoring_hidden']:.0%}" for run in runs]
    lines["rollouts by times deferred"] = [histogram(run["deferred"]) for run in runs]
    lines["reward, first to last steps"] = [f"{run['reward_first']:.2f} to {run['reward_last']:.2f}" for run in runs]
    for when in ("before", "after"):
        accuracies = [(run[f"accuracy_{when}"], run[f"error_{when}"]) for run in runs]
        lines[f"held-out accuracy {when}"] = [
            f"{mean:.1%}" + ("" if error is None else f" ± {error:.1%}") for mean, error in accuracies
        ]
    lines["difference from the first"] = ["", difference(*runs)]
    rows = [{"": label, **dict(zip(figures, values, strict=True))} for label, values in lines.items()]
    return "\n".join(
        [
            f"{algorithm.upper()} on arithmetic: the same start, the same steps",
            format_table({"": "", **{name: name for name in figures}}, rows),
            "±: standard error over the held-out problems; another seed changes an accuracy by more",
        ]
    )


def difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Difference of final accuracies, noise below two standard errors (of independent samples: an upper bound)."""
    change = other["accuracy_after"] - first["accuracy_after"]
    errors = [run["error_after"] for run in (first, other)]
    if None in errors:
        return f"{change:+.1%}"
    error = math.hypot(*errors)
    return f"{change:+.1%} ± {error:.1%}{', which is noise' if abs(change) < 2 * error else ''}"


def histogram(deferred: Mapping[str, int]) -> str:
    total = sum(deferred.values())
    return ", ".join(f"{times}: {count / total:.0%}" for times, count in deferred.items())


def _figures(run: RunDirectory) -> dict[str, Any]:
    summary = read_json(run.summary.read_text(encoding="utf-8"))
    errors = [line["error"][ACCURACY] for line in summary["heldout"].values()]
    return {name: summary[name] for name in FIGURES} | {"error_before": errors[0], "error_after": errors[-1]}
