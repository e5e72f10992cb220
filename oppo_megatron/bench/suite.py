"""Compared runs: each is an ordinary PPO run in a directory of its own; they take turns, and their metrics are kept.

The ranks are started by a `Launch` that the caller gives, so that a benchmark does not depend on the command line.

With forced lengths all runs of equal steps decode the same tokens, however they carry them from step to step: by the end
every decoded rollout is trained.  Without them a policy that trains on other batches gives other responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oppo_megatron.bench.outcomes import BenchError, BenchStopped
from oppo_megatron.bench.peaks import describe_machine
from oppo_megatron.cluster.held_memory import device_bytes
from oppo_megatron.config.load import config_yaml
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import EXIT_REQUEUE, ConfigError
from oppo_megatron.layout.holdings import lasting_memory
from oppo_megatron.layout.memory import shortage
from oppo_megatron.layout.placements import named_roles, world_size
from oppo_megatron.preflight.validate import train_problems
from oppo_megatron.rundir.directory import RunDirectory, write_json
from oppo_megatron.rundir.metrics_log import read_metrics

Launch = Callable[[str, TrainConfig, int], int]
"""(kind of run, checked configuration, ranks) -> exit code."""

Lines = Sequence[Mapping[str, Any]]
"""The metrics of a run, an entry a step."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path
    lines: Lines


Runs = Mapping[str, Sequence[Run]]
"""The compared runs by name, one a repeat."""


@dataclass(frozen=True)
class Suite:
    """Makes the runs of a benchmark below `out`.

    `resume`: finished runs of the same configuration, which an earlier attempt has left there, are taken as they are; None:
    whoever calls has no way to ask for that.
    """

    out: Path
    repeats: int
    launch: Launch
    say: Callable[[str], None] = lambda text: print(text, flush=True)
    resume: bool | None = None

    def run(self, configs: Mapping[str, TrainConfig]) -> dict[str, list[Run]]:
        """Run each configuration `repeats` times, in turn: A B C A B C.  A run lies in `out/NAME-TURN`.

        Raises ConfigError, before anything starts, where a configuration is wrong or an earlier run is in the way;
        BenchError where a run fails, BenchStopped where it was told to stop.
        """
        planned = {name: self._turns(name, config) for name, config in configs.items()}
        _check(planned, self.resume)
        runs: dict[str, list[Run]] = {name: [] for name in configs}
        try:
            for turn in range(self.repeats):
                for name, turns in planned.items():
                    self.say(f"--- {name}, run {turn + 1} of {self.repeats} ({_progress(runs, 1, self.repeats)})")
                    runs[name].append(self._run(name, turns[turn]))
        except BaseException:
            hint = "" if self.resume is None else " yet: the same command with --resume goes on"
            self.say(
                f"--- {_progress(runs, 0, self.repeats)} runs are finished and stay in {self.out}, each with its metrics.jsonl; "
                f"nothing is compared{hint}"
            )
            raise
        return runs

    def write(self, kind: str, config: TrainConfig, figures: Mapping[str, Any], runs: Runs) -> Path:
        """`out/KIND.json`: machine, configuration, figures, and every run's metrics step by step."""
        path = self.out / f"{kind}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = {name: [{"run_dir": run.path, "steps": run.lines} for run in turns] for name, turns in runs.items()}
        settings = {"repeats": self.repeats, "config": config.model_dump(mode="json")}
        write_json(path, {"bench": kind, "machine": describe_machine(), **settings, **figures, "runs": raw})
        return path

    def _turns(self, name: str, config: TrainConfig) -> list[TrainConfig]:
        return [
            config.model_copy(update={"run_dir": self.out / f"{name}-{turn}"}) for turn in range(1, self.repeats + 1)
        ]

    def _run(self, name: str, config: TrainConfig) -> Run:
        if RunDirectory(config.run_dir).finished:  # and of this very configuration, see `_check`
            self.say(f"finished before: {config.run_dir}")
            return Run(config.run_dir, read_metrics(RunDirectory(config.run_dir).metrics))
        code = self.launch("train", config, world_size(config))
        if code == EXIT_REQUEUE:
            raise BenchStopped(f"told to stop in the run {name}, which saved itself in {config.run_dir}")
        if code:
            raise BenchError(f"the run {name} in {config.run_dir} ended with exit code {code}; its message is above")
        return Run(config.run_dir, read_metrics(RunDirectory(config.run_dir).metrics))


def bare(config: TrainConfig) -> TrainConfig:
    """The configuration without held-out evaluation, final weights and checkpoints that it does not ask for, which are no
    part of a step; with the trace, which is read."""
    logging = config.logging.model_copy(update={"trace": True})
    checkpoint = config.checkpoint.model_copy(update={"every_minutes": 0.0, "final": "nothing"})
    changes = {
        "evaluation": None,
        "early_stop": None,
        "logging": logging,
        "checkpoint": checkpoint,
    }
    return config.model_copy(update=changes)


def require_scorers(config: TrainConfig, so: str) -> None:
    """Raises ConfigError, with what follows from it, where no model scores responses beside their decoding."""
    if len(named_roles(config)) == 1:
        raise ConfigError(
            f"algorithm.preset {config.algorithm.preset} with ppo.kl.mode {config.ppo.kl.mode} and these rewards has no "
            f"reference, critic or reward model, so {so}; give a configuration with one of them"
        )


def all_lines(runs: Sequence[Run]) -> list[Lines]:
    """The metrics of each run."""
    return [run.lines for run in runs]


def _progress(runs: Runs, ahead: int, repeats: int) -> str:
    return f"{sum(map(len, runs.values())) + ahead} of {len(runs) * repeats}"


def _check(planned: Mapping[str, Sequence[TrainConfig]], resume: bool | None) -> None:
    problems = [problem for name, turns in planned.items() for problem in _problems(name, turns, resume)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))


def _shortages(config: TrainConfig) -> Iterator[str]:
    """All ranks of a run are on this machine.  On CUDA devices they see for themselves whether memory suffices."""
    if config.runtime.device == "cuda" or (config.runtime.device == "auto" and torch.cuda.is_available()):
        return
    lasting = lasting_memory(config, on_cpu=True)
    problem = shortage(lasting, device_bytes(torch.device("cpu")), "all ranks", "this machine")
    if problem:
        yield problem


def _is_of(run: RunDirectory, config: TrainConfig) -> bool:
    """Whether a finished run was made with this very configuration."""
    return run.config.exists() and run.config.read_text(encoding="utf-8") == config_yaml(config)


def _problems(name: str, turns: Sequence[TrainConfig], resume: bool | None) -> Iterator[str]:
    problems = train_problems(turns[0])
    for problem in problems or _shortages(turns[0]):
        yield f"{name}: {problem}"
    for config in turns:
        run = RunDirectory(config.run_dir)
        if run.finished and not resume:
            take = "" if resume is None else "take it as it is with --resume, "
            yield (
                f"{run.path} holds a finished run, which is not written over; {take}name another folder with --out, "
                "or remove this one"
            )
        elif run.finished and not _is_of(run, config):
            yield (
                f"{run.path} holds a finished run of another configuration (its config.yaml), which --resume cannot "
                "take; name another folder with --out, or remove this one"
            )
        elif not run.finished and run.has_checkpoints:
            yield (
                f"{run.path} holds the checkpoints of a run that did not finish; name another folder with --out, or "
                "remove this one"
            )


def work_figures(runs: Runs) -> dict[str, Any]:
    """`decoded_tokens` of each run by name, one number a repeat, and `same_work`: whether all are equal."""
    tokens = {name: [sum(line["tokens"] for line in run.lines) for run in turns] for name, turns in runs.items()}
    return {"same_work": len({count for counts in tokens.values() for count in counts}) <= 1, "decoded_tokens": tokens}


def work_lines(result: Mapping[str, Any]) -> list[str]:
    """The findings of `work_figures` in words."""
    tokens = result["decoded_tokens"]
    if result["same_work"]:
        return [f"the same work: {next(iter(tokens.values()))[0]} decoded tokens in every run"]
    found = ", ".join(f"{name} {' '.join(map(str, counts))}" for name, counts in tokens.items())
    return [
        f"NOT the same work (decoded tokens: {found}): seconds and totals do not compare, tokens/s do; force lengths with "
        "--lognormal or --trace"
    ]


def require_same_work(config: TrainConfig, result: Mapping[str, Any]) -> None:
    """Raises BenchError for runs of forced lengths that did not do the same work."""
    if config.debug.forced_lengths is not None and not result["same_work"]:
        raise BenchError(f"lengths were forced, but this is {work_lines(result)[0].partition(';')[0]}")
