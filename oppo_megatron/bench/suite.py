"""PPO runs that take turns, such as one configuration in every mode of the loop. With forced lengths, runs of equal steps decode
the same tokens: all are trained in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from oppo_megatron.bench.figures import Lines, describe_machine, figures, speedups
from oppo_megatron.cluster.held_memory import device_bytes
from oppo_megatron.config.derived import MODES, switched
from oppo_megatron.config.load import config_yaml
from oppo_megatron.config.model import ParallelConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import EXIT_REQUEUE, ConfigError, OppoError
from oppo_megatron.layout.memory import shortage
from oppo_megatron.layout.placements import world_size
from oppo_megatron.layout.role_memory import lasting_memory
from oppo_megatron.preflight.validate import train_problems
from oppo_megatron.report.comparison import draw_steps, draw_utilization
from oppo_megatron.report.timeline import KINDS, utilization, work_seconds
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import read_metrics

Launch = Callable[[str, TrainConfig, int], int]
"""(kind of run, checked configuration, ranks) -> exit code."""


class BenchError(OppoError, RuntimeError):
    """A benchmark run failed."""


class BenchStopped(BenchError):
    """The benchmark was asked to stop, and stopped its run."""


@dataclass(frozen=True)
class Run:
    path: Path
    lines: Lines


Runs = Mapping[str, Sequence[Run]]
"""Compared runs by name, one per repeat."""


@dataclass(frozen=True)
class Suite:
    """`resume`: reuse finished runs (None: no such option)."""

    out: Path
    repeats: int
    launch: Launch
    say: Callable[[str], None] = lambda text: print(text, flush=True)
    resume: bool | None = None

    def run(self, configs: Mapping[str, TrainConfig]) -> dict[str, list[Run]]:
        """Take turns (A B C A B C) in `out/NAME-TURN`. Raises ConfigError before the first run, BenchError, or BenchStopped."""
        planned = {
            name: [config.model_copy(update={"run_dir": self.out / f"{name}-{turn + 1}"}) for turn in range(self.repeats)]
            for name, config in configs.items()
        }
        if problems := [problem for name, turns in planned.items() for problem in _problems(name, turns, self.resume)]:
            raise ConfigError(list(dict.fromkeys(problems)))
        runs: dict[str, list[Run]] = {name: [] for name in configs}
        count = len(configs) * self.repeats
        try:
            for turn in range(self.repeats):
                for name, turns in planned.items():
                    done = sum(map(len, runs.values()))
                    self.say(f"--- {name}, run {turn + 1} of {self.repeats} ({done + 1} of {count})")
                    runs[name].append(self._run(name, turns[turn]))
        except BaseException:
            hint = "" if self.resume is None else "; continue with the same command and --resume"
            self.say(
                f"--- {sum(map(len, runs.values()))} of {count} runs are finished and stay in {self.out}, each with its "
                f"metrics.jsonl; nothing is compared yet{hint}"
            )
            raise
        return runs

    def write(self, kind: str, config: TrainConfig, figures: Mapping[str, Any], runs: Runs) -> Path:
        """Write `out/KIND.json` with every run's metrics."""
        path = self.out / f"{kind}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = {name: [{"run_dir": run.path, "steps": run.lines} for run in turns] for name, turns in runs.items()}
        settings = {"repeats": self.repeats, "config": config.model_dump(mode="json")}
        write_json(path, {"bench": kind, "machine": describe_machine(), **settings, **figures, "runs": raw})
        return path

    def _run(self, name: str, config: TrainConfig) -> Run:
        run = RunDirectory(config.run_dir)
        if run.finished:  # `_problems` has compared its configuration
            self.say(f"finished before: {config.run_dir}")
            return Run(config.run_dir, read_metrics(run.metrics))
        code = self.launch("train", config, world_size(config))
        if code == EXIT_REQUEUE:
            raise BenchStopped(f"the run {name} was asked to stop and saved itself in {config.run_dir}")
        if code:
            raise BenchError(f"the run {name} in {config.run_dir} ended with exit code {code}; its message is above")
        return Run(config.run_dir, read_metrics(run.metrics))


def bare(config: TrainConfig) -> TrainConfig:
    """Trace the run, without evaluation, final weights and timed checkpoints."""
    logging = config.logging.model_copy(update={"trace": True})
    checkpoint = config.checkpoint.model_copy(update={"every_minutes": 0.0, "final": "nothing"})
    changes = {"evaluation": None, "early_stop": None, "logging": logging, "checkpoint": checkpoint}
    return config.model_copy(update=changes)


def all_lines(runs: Sequence[Run]) -> list[Lines]:
    return [run.lines for run in runs]


def _problems(name: str, turns: Sequence[TrainConfig], resume: bool | None) -> Iterator[str]:
    found, device = train_problems(turns[0]), turns[0].runtime.device
    if not found and (device == "cpu" or (device == "auto" and not torch.cuda.is_available())):
        memory = device_bytes(torch.device("cpu"))
        lacking = shortage(lasting_memory(turns[0], on_cpu=True), memory, "all ranks", "this machine")
        found = [lacking] if lacking else []
    yield from (f"{name}: {problem}" for problem in found)
    for config in turns:
        run = RunDirectory(config.run_dir)
        remedy = "name another folder with --out, or remove this one"
        if run.finished and not resume:
            take = "" if resume is None else "take it as it is with --resume, "
            yield f"{run.path} holds a finished run, which is not overwritten; {take}{remedy}"
        elif run.finished and not (run.config.exists() and run.config.read_text(encoding="utf-8") == config_yaml(config)):
            yield (
                f"{run.path} holds a finished run of another configuration (its config.yaml), which --resume cannot "
                f"take; {remedy}"
            )
        elif not run.finished and run.has_checkpoints:
            yield f"{run.path} holds the checkpoints of an unfinished run; {remedy}"


def work_figures(runs: Runs) -> dict[str, Any]:
    """Each run's `decoded_tokens` per repeat, and `same_work`: true if all are equal."""
    tokens = {name: [sum(line["tokens"] for line in run.lines) for run in turns] for name, turns in runs.items()}
    return {"same_work": len({count for counts in tokens.values() for count in counts}) <= 1, "decoded_tokens": tokens}


def work_lines(result: Mapping[str, Any]) -> list[str]:
    tokens = result["decoded_tokens"]
    if result["same_work"]:
        return [f"the same work: {next(iter(tokens.values()))[0]} decoded tokens in every run"]
    found = ", ".join(f"{name} {' '.join(map(str, counts))}" for name, counts in tokens.items())
    return [
        f"NOT the same work (decoded tokens: {found}): seconds and totals do not compare, tokens/s do; force lengths with "
        "--lognormal or --trace"
    ]


def require_same_work(config: TrainConfig, result: Mapping[str, Any]) -> None:
    if config.rollout.forced_lengths is not None and not result["same_work"]:
        raise BenchError(f"lengths were forced, but this is {work_lines(result)[0].partition(';')[0]}")


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
    layout = {"tp": None, "pp": None, "dp": None, "vpp": 1, "cp": 1, "ep": 1, "sequence_parallel": False}
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
