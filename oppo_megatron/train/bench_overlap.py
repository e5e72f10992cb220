"""What the overlaps save: one configuration in the four modes of the one loop, and the figures of each.

Seed and prompts are the same in all modes.  Lengths are the same only if `rollout.forced_lengths` is set: otherwise a
policy that trains on other batches says other things.  With forced lengths all modes train the same tokens in the same
number of steps, so `total_s` compares like with like to the token; inter-step overlap moves work from a step to the
one before, so its first step is longer and its last ones shorter than `step_s`, the median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.train.machine import describe_machine
from oppo_megatron.train.metrics_log import read_metrics
from oppo_megatron.train.run_dir import RunDirectory

MODES: dict[str, dict[str, Any]] = {
    "sequential": {"intra": False, "inter": False},
    "intra": {"intra": True, "inter": False},
    "inter": {"intra": False, "inter": True},
    "full": {"intra": True, "inter": True},
}
WEAVES: dict[str, dict[str, Any]] = {
    "sequential": {"intra": False},
    "unwoven": {"intra": True, "schedule": "intra"},
    "woven": {"intra": True, "schedule": "woven"},
}
"""Switches of `overlap` by name: what `oppo bench overlap` and `oppo bench weave` compare."""

Lines = Sequence[Mapping[str, Any]]


def mode_config(config: TrainConfig, switches: Mapping[str, Any], run_dir: Path, *, actions: bool) -> TrainConfig:
    """The configuration with the switches of a mode, in a run directory of its own; `actions`: with a span for each."""
    overlap = config.overlap.model_copy(update=switches)
    logging = config.logging.model_copy(update={"trace": True, "actions": True}) if actions else config.logging
    return config.model_copy(update={"run_dir": run_dir, "overlap": overlap, "logging": logging})


def compare(config: TrainConfig, runs: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """The figures of `oppo bench overlap` as one JSON object; `runs` holds the run directories of each mode."""
    measured = {mode: [read_metrics(RunDirectory(run).metrics) for run in paths] for mode, paths in runs.items()}
    rows = [{"mode": mode, **figures(lines)} for mode, lines in measured.items()]
    plain = next((row for row in rows if row["mode"] == "sequential"), None)
    for row in rows:
        for name in ("step_s", "total_s"):
            row[f"speedup_{name}"] = None if plain is None else plain[name] / row[name]
    return {"machine": describe_machine(), "config": config.model_dump(mode="json"), "results": rows}


def figures(runs: Sequence[Lines]) -> dict[str, Any]:
    """Medians over the steps after the first of all runs; ratios of sums over the same steps; totals over all steps."""
    steady = [line for lines in runs for line in (lines[1:] or lines)]
    busy = sum(line["score_busy_s"] for line in steady)
    exposed = sum(line["score_exposed_s"] for line in steady)
    names = ("step_s", "decode_s", "score_exposed_s", "score_busy_s", "train_s")
    return {
        **{name: median(line[name] for line in steady) for name in names},
        "idle_actor_s": median(line["idle_s"]["actor"] for line in steady),
        "idle_scorer_s": median(line["idle_s"]["scorer"] for line in steady),
        "hidden_percent": 100 * max(0.0, 1 - exposed / busy) if busy else None,
        "tokens_per_s": sum(line["tokens"] for line in steady) / sum(line["step_s"] for line in steady),
        "total_s": median(sum(line["step_s"] for line in lines) for lines in runs),
        "tokens": [sum(line["tokens"] for line in lines) for lines in runs],
        "step_s_by_run": [[line["step_s"] for line in lines] for lines in runs],
    }
