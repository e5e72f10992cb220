"""Time saved by overlap: one configuration and seed in every mode of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from oppo_megatron.bench.figures import figures, speedups
from oppo_megatron.bench.suite import Runs, Suite, all_lines, require_same_work, work_figures
from oppo_megatron.config.derived import MODES, switched
from oppo_megatron.config.model import ParallelConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.placements import world_size
from oppo_megatron.report.comparison import draw_steps, draw_utilization
from oppo_megatron.report.timeline import KINDS, utilization, work_seconds

PLACEMENTS = ("pair", "single", "replicas")
"""As configured; one process with all cores; data-parallel processes with one core each."""

COLUMNS = {
    "placement": "placement", "mode": "mode", "s/step": "step_s", "decode": "decode_s",
    "exp. scoring": "score_exposed_s", "%": "score_exposed_percent", "exp. critic": "critic_exposed_s",
    "% ": "critic_exposed_percent", "train": "train_s", "idle actor": "idle_actor_s", "idle scorer": "idle_scorer_s",
    "tokens/s": "tokens_per_s", "x seq": "speedup_step_s", "x best": "best_step_s", "total s": "total_s",
    "x seq ": "speedup_total_s", "x best ": "best_total_s",
}  # fmt: skip

RANK_COLUMNS = {"placement": "placement", "mode": "mode", "rank": "rank"} | {f"{kind} %": kind for kind in (*KINDS, "idle")}


def bench_overlap(
    suite: Suite, config: TrainConfig, modes: Sequence[str], placements: Sequence[str], cores: int
) -> dict[str, Any]:
    """Write overlap.json, overlap.png and utilization.png."""
    configs = {
        f"{placement}/{mode}": switched(placed(config, placement, cores), mode) for placement in placements for mode in modes
    }
    if config.filter is not None:
        suite.say("--- every mode runs without the filter: all groups are trained, so that all runs do the same work")
    runs = suite.run(configs)
    result = compare(configs, runs) | work_figures(runs)
    suite.write("overlap", config, {"cores": cores, **result}, runs)
    draw_steps(result["results"], suite.out / "overlap.png")
    draw_utilization(result["utilization"], suite.out / "utilization.png")
    require_same_work(config, result)
    return result


def known_modes(config: TrainConfig) -> list[str]:
    """Modes that differ: only with a critic there is an update of it to hide."""
    return [mode for mode, switch in MODES.items() if config.critic is not None or not switch["hide_critic"]]


def placed(config: TrainConfig, placement: str, cores: int) -> TrainConfig:
    """The configuration without the roles' own ranks and layouts."""
    if placement == "pair":
        return config
    single = placement == "single"
    here = {"mode": "single" if single else "colocated", "actor": ParallelConfig(dp=1 if single else cores), "scorer": None}
    changes: dict[str, Any] = {
        "placement": config.placement.model_copy(update=here),
        "runtime": config.runtime.with_threads(cores if single else 1),
    }
    layout = {"tp": None, "pp": None, "dp": None, "vpp": 1, "sequence_parallel": False}
    for name in ("actor", "critic", "reward", "reference"):
        role = getattr(config, name)
        if role is None:
            continue
        update: dict[str, Any] = {"ranks": None, "parallel": None}
        if name in ("actor", "critic"):
            update["train"] = role.train.model_copy(update=layout)
        changes[name] = role.model_copy(update=update)
    return config.model_copy(update=changes)


def compare(configs: Mapping[str, TrainConfig], runs: Runs) -> dict[str, Any]:
    rows = []
    for name, turns in runs.items():
        placement, mode = name.split("/")
        rows.append({"placement": placement, "mode": mode, "ranks": world_size(configs[name]), **figures(all_lines(turns))})
    plain = {row["placement"]: row for row in rows if row["mode"] == "sequential"}
    best = {seconds: min(plain.values(), key=lambda row: row[seconds], default=None) for seconds in ("step_s", "total_s")}
    for row in rows:
        row |= speedups(row, plain.get(row["placement"]), "speedup")
        for seconds, base in best.items():
            row[f"best_{seconds}"] = None if base is None else base[seconds] / row[seconds]
    return {
        "results": rows,
        "best_sequential": {s: None if base is None else base["placement"] for s, base in best.items()},
        "nothing_waits": [nothing_waits(placement, runs) for placement in plain],
        "utilization": {name: utilization([run.path for run in turns]) for name, turns in runs.items()},
    }


def nothing_waits(placement: str, runs: Runs) -> dict[str, Any]:
    """Each mode's time over the least: the work of the busiest rank in the sequential run."""
    own = [work_seconds(run.path) for run in runs[f"{placement}/sequential"]]
    ranks = []
    for rank in sorted(own[0]):
        works = [work[rank] for work in own]
        steady = [seconds for work in works for step, seconds in work.items() if step > 1 or len(work) == 1]
        ranks.append({"rank": rank, "step_s": median(steady), "total_s": fmean(sum(work.values()) for work in works)})
    least = {seconds: max(rank[seconds] for rank in ranks) for seconds in ("step_s", "total_s")}
    ratios = {}
    for name, turns in runs.items():
        if name.startswith(f"{placement}/"):
            found = figures(all_lines(turns))
            ratios[name.split("/")[1]] = {seconds: found[seconds] / least[seconds] for seconds in least}
    return {"placement": placement, "ranks": ranks, "least": least, "over_least": ratios}


def remarks(result: Mapping[str, Any], out: Path) -> list[str]:
    lines = []
    best = result["best_sequential"]["step_s"]
    if best is not None:
        seconds = next(r["step_s"] for r in result["results"] if (r["placement"], r["mode"]) == (best, "sequential"))
        lines.append(f"best sequential placement: {best}, {seconds:.2f} s/step")
    for found in result["nothing_waits"]:
        works = ", ".join(f"{rank['step_s']:.2f}" for rank in found["ranks"])
        lines.append(
            f"{found['placement']}: alone, its ranks work {works} s per step; a step without waiting takes as long "
            f"as the busiest, {found['least']['step_s']:.2f} s"
        )
        ratios = (f"{mode} {ratio['step_s']:.2f}" for mode, ratio in found["over_least"].items())
        lines.append(f"  s/step over that: {', '.join(ratios)}")
    files = ("overlap.json", "overlap.png", "utilization.png")
    return [*lines, f"figures: {', '.join(str(out / file) for file in files)}"]
