"""Find, measure and choose placements. `placement.mode: auto` measures on W ranks:

    single           one process; on CUDA only if there is one device
    disaggregated    actor | scorers: W-1 | 1, three quarters | one, half | half; on CPU also 1 | 1 with W/2 threads each
    colocated        all roles on W ranks

Each with the least and the largest tensor parallelism, without pipelines; the former also with the reference on the actor's
ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from oppo_megatron import __version__
from oppo_megatron.config.model import ParallelConfig, PlacementConfig, PlacementMode
from oppo_megatron.config.run import LoggingConfig, TrainConfig, TrainSettings
from oppo_megatron.cores import asked_threads
from oppo_megatron.errors import ConfigError, PlacementError
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.layouts import divisors
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.modeldir.headers import read_hf_config

WITH_ACTOR = " (reference: actor)"

MODES: tuple[PlacementMode, ...] = ("single", "disaggregated", "colocated")


@dataclass(frozen=True)
class Machine:
    device: Literal["cpu", "cuda"]
    units: int

    def __str__(self) -> str:
        what = "core" if self.device == "cpu" else "CUDA device"
        return f"{self.units} {what}{'s' * (self.units > 1)}"


@dataclass(frozen=True)
class Candidate:
    placement: PlacementConfig

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Candidate:
        return cls(PlacementConfig.model_validate(record["chosen"]["placement"]))

    @property
    def name(self) -> str:
        placement = self.placement
        if placement.mode == "single":
            return "single"
        actor, scorer = _sizes(placement.actor), _sizes(placement.scorer or ParallelConfig())
        if placement.mode == "colocated":
            return f"colocated {actor}"
        return f"disaggregated {actor} | {scorer}{WITH_ACTOR * (placement.reference == 'actor')}"

    @property
    def num_ranks(self) -> int:
        placement = self.placement
        if placement.mode != "disaggregated" or placement.scorer is None:
            return placement.actor.num_ranks
        return placement.actor.num_ranks + placement.scorer.num_ranks

    def yaml_tree(self) -> dict[str, Any]:
        placement = self.placement
        parts = {"actor": placement.actor, "scorer": placement.scorer} if placement.mode != "single" else {}
        layouts = {key: part.model_dump() for key, part in parts.items() if part is not None}
        reference = {"reference": placement.reference} if placement.reference != "scorer" else {}
        return {"mode": placement.mode, **layouts, **reference}


@dataclass(frozen=True)
class LeftOut:
    name: str
    reason: str


@dataclass(frozen=True)
class Options:
    machine: Machine
    candidates: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...]


def find_candidates(settings: TrainSettings, machine: Machine) -> Options:
    """Raises ConfigError if there are none."""
    finder = _Finder(settings, machine, most_ranks(settings, machine))
    found = [option for mode in MODES for option in finder.options(mode)]
    candidates = tuple(option for option in found if isinstance(option, Candidate))
    left_out = tuple(option for option in found if isinstance(option, LeftOut))
    if not candidates:
        reasons = "; ".join(f"{option.name}: {option.reason}" for option in left_out)
        raise ConfigError(
            f"placement.mode is auto, but none of {', '.join(MODES)} is possible on {machine} ({reasons}); "
            "change OMP_NUM_THREADS, or choose a placement yourself"
        )
    return Options(machine, candidates, left_out)


def most_ranks(settings: TrainSettings, machine: Machine) -> int:
    """One rank per CUDA device, or cores over threads per rank."""
    if machine.device == "cuda":
        return machine.units
    return max(1, machine.units // max(1, asked_threads()))


class _Finder:
    def __init__(self, settings: TrainSettings, machine: Machine, num_ranks: int):
        self.settings, self.machine, self.num_ranks = settings, machine, num_ranks
        roles = named_roles(settings.with_placement(PlacementConfig(mode="single")))
        self.shapes: Mapping[str, Mapping[str, Any]] = {name: read_hf_config(role) for name, role in roles.items()}

    def options(self, mode: PlacementMode) -> Iterator[Candidate | LeftOut]:
        if mode == "single":
            if self.machine.device == "cuda" and self.num_ranks > 1:
                yield LeftOut(mode, f"one process uses one of {self.machine}")
            else:
                yield from self._fitting(mode, [PlacementConfig(mode=mode)])
        elif self.num_ranks == 1:
            needs = "needs a rank for the actor and another for the scorers, and there is one"
            yield LeftOut(mode, needs if mode == "disaggregated" else "is the same as single on one rank")
        elif mode == "colocated":
            yield from self._fitting(mode, [PlacementConfig(mode=mode, actor=actor) for actor in _layouts(self.num_ranks)])
        else:
            ranks = self.num_ranks
            splits = [(ranks - count, count) for count in (1, max(1, ranks // 4), ranks // 2)]
            if self.machine.device == "cpu" and not (self.settings.runtime.threads_per_rank or asked_threads()):
                splits.insert(0, (1, 1))
            for actors, scorers in dict.fromkeys(splits):
                yield from self._split(actors, scorers)

    def _split(self, actors: int, scorers: int) -> Iterator[Candidate | LeftOut]:
        name, pairs = f"disaggregated {actors} | {scorers}", product(_layouts(actors), _layouts(scorers))
        placements = [PlacementConfig(mode="disaggregated", actor=actor, scorer=scorer) for actor, scorer in pairs]
        found = list(self._fitting(name, placements))
        yield from found
        if isinstance(found[0], Candidate):
            moved = found[0].placement.model_copy(update={"reference": "actor"})
            yield from self._fitting(name + WITH_ACTOR, [moved])

    def _fitting(self, name: str, placements: list[PlacementConfig]) -> Iterator[Candidate | LeftOut]:
        """Yield the first and last that pass the checks, or why the first fails."""
        problems = [check_layouts(self.settings.with_placement(placement), self.shapes) for placement in placements]
        fitting = [placement for placement, found in zip(placements, problems, strict=True) if not found]
        if not fitting:
            yield LeftOut(name, problems[0][0].partition(";")[0])
        for placement in fitting[:1] + fitting[1:][-1:]:
            yield Candidate(placement)


def _layouts(num_ranks: int) -> list[ParallelConfig]:
    return [ParallelConfig(tp=tp, dp=num_ranks // tp) for tp in divisors(num_ranks)]


def _sizes(layout: ParallelConfig) -> str:
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1"


PARTS = {"decode_s": "rounds that decode", "train_s": "update of the actor", "other_s": "scoring and waiting that nothing hides"}
"""Parts of a step on the actor's output rank: attributes of `Run`."""
MEASURED_STEPS = 3
"""Includes a warm-up step."""
CLOSE = 0.05
"""Placements within this share of the least time are measured again."""
CONFIRMED_RUNS = 3


class Run(NamedTuple):
    """Sums over the steps after the first, on the actor's output rank."""

    steps: int
    tokens: int  # of trained responses
    seconds: float
    decode_s: float  # rounds that decoded
    train_s: float  # updates of the actor

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens

    @property
    def other_s(self) -> float:
        return self.seconds - self.decode_s - self.train_s


Measure = Callable[[Candidate, int], Run]
"""Measures a placement for the n-th time (from 1). Raises PlacementError if it cannot run."""


@dataclass
class Trial:
    candidate: Candidate
    runs: list[Run] = field(default_factory=list)
    failure: str | None = None

    @property
    def seconds_per_token(self) -> float:
        return median(run.seconds_per_token for run in self.runs)

    @property
    def spread(self) -> float:
        seconds = [run.seconds_per_token for run in self.runs]
        return (max(seconds) - min(seconds)) / median(seconds)

    def take(self, measure: Measure) -> None:
        try:
            self.runs.append(measure(self.candidate, len(self.runs) + 1))
        except PlacementError as error:
            self.failure = str(error)


def measure_all(candidates: Sequence[Candidate], measure: Measure) -> list[Trial]:
    """Measure each once, then close ones in turn, so that other load affects all."""
    trials = [Trial(candidate) for candidate in candidates]
    for trial in trials:
        trial.take(measure)
    while unsure := [trial for trial in close_ones(trials) if len(trial.runs) < CONFIRMED_RUNS]:
        for trial in unsure:
            trial.take(measure)
    return trials


def running(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.failure is None]


def close_ones(trials: Sequence[Trial]) -> list[Trial]:
    """The fastest and those within `CLOSE`; none if it is alone."""
    left = running(trials)
    least = min((trial.seconds_per_token for trial in left), default=0.0)
    close = [trial for trial in left if trial.seconds_per_token <= least * (1 + CLOSE)]
    return close if len(close) > 1 else []


def probe_config(settings: TrainSettings, placement: PlacementConfig, run_dir: Path) -> TrainConfig:
    """A short quiet run that keeps no weights; chunks are fixed, because adaptive ones would differ in every step."""
    changes = {
        "run_dir": run_dir, "steps": MEASURED_STEPS, "epochs": None, "evaluation": None, "early_stop": None,
        "overlap.chunk": settings.overlap.chunk_tokens, "logging": LoggingConfig(console="off", trace=False),
        "checkpoint.every_minutes": 0.0, "checkpoint.final": "nothing",
    }  # fmt: skip
    return settings.with_placement(placement).with_values(changes)


def fingerprint(settings: TrainSettings, machine: Machine) -> str:
    probe = probe_config(settings, PlacementConfig(mode="single"), Path())
    measured = [__version__, asdict(machine), asked_threads(), MEASURED_STEPS, probe.model_dump(mode="json")]
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:16]


def read_run(lines: Sequence[Mapping[str, Any]]) -> Run:
    """Raises PlacementError if there is only one line."""
    steady = lines[1:]
    if not steady:
        raise PlacementError(
            f"the measuring run has {len(lines)} step{'s' * (len(lines) != 1)}, but the first one only warms up and another "
            "must follow; give more prompts"
        )
    tokens = sum(line["trained_len_mean"] * sum(line["deferred"].values()) for line in steady)
    seconds, decode_s, train_s = (sum(line[name] for line in steady) for name in ("step_s", "decode_s", "train_s"))
    return Run(len(steady), round(tokens), seconds, decode_s, train_s)


@dataclass(frozen=True)
class Choice:
    """`margin`: extra time share of the next; None if there is none."""

    candidate: Candidate
    margin: float | None
    reason: str


def choose(options: Options, trials: Sequence[Trial]) -> Choice:
    """Raises PlacementError with the first error if all failed."""
    if len(options.candidates) == 1 and not trials:
        only = options.candidates[0]
        return Choice(only, None, f"{only.name} is the only placement to choose from on {options.machine}; nothing measured")
    order = sorted(running(trials), key=lambda trial: trial.seconds_per_token)
    if not order:
        first = trials[0]
        raise PlacementError(
            f"none of {len(trials)} placements could be measured; the first, {first.candidate.name}, ended with: {first.failure}"
        )
    best = order[0]
    speed = f"{1 / best.seconds_per_token:.4g} tokens/s ({_a_step(best, 'seconds'):.3g} s per step)"
    speed = f"{best.candidate.name} trains {speed}"
    if len(order) == 1:
        return Choice(best.candidate, None, f"{speed}; of {len(trials)} placements it is the only one that ran")
    following = order[1]
    margin = following.seconds_per_token / best.seconds_per_token - 1
    gains = {part: _a_step(following, part) - _a_step(best, part) for part in PARTS}
    part = max(gains, key=lambda name: gains[name])
    reasons = [
        f"{speed}; the next, {following.candidate.name}, needs {margin:.1%} more time",
        f"most of it in {PARTS[part]}: {_a_step(best, part):.3g} s per step against {_a_step(following, part):.3g}",
    ]
    if close := close_ones(trials):
        spread = max(trial.spread for trial in close)
        runs = f"{len(close)} are this close and were run {min(len(trial.runs) for trial in close)} times or more"
        either = ", more than their difference: take it as a draw" if spread > margin else ""
        reasons.append(f"{runs}; runs of one placement differ by up to {spread:.1%}{either}")
    return Choice(best.candidate, margin, "; ".join(reasons))


def _a_step(trial: Trial, part: str) -> float:
    return median(float(getattr(run, part)) / run.steps for run in trial.runs)


def to_record(key: str, options: Options, trials: Sequence[Trial], choice: Choice) -> dict[str, Any]:
    """Content of `placement.json`; `key`: its `fingerprint`."""
    tried = {trial.candidate.name: trial for trial in trials}
    return {
        "chosen": {"name": choice.candidate.name, "placement": choice.candidate.yaml_tree()},
        "reason": choice.reason,
        "margin": choice.margin,
        "machine": asdict(options.machine),
        "candidates": [_row(candidate, tried.get(candidate.name)) for candidate in options.candidates],
        "left_out": [asdict(option) for option in options.left_out],
        "key": key,
    }


def _row(candidate: Candidate, trial: Trial | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": candidate.name, "placement": candidate.yaml_tree(), "ranks": candidate.num_ranks}
    if trial is None:
        return row
    row |= {"failure": trial.failure, "runs": [run._asdict() for run in trial.runs]}
    if trial.failure is None:
        row |= {"seconds_per_token": trial.seconds_per_token, "spread": trial.spread}
        row |= {f"step_{part}": _a_step(trial, part) for part in ("seconds", *PARTS)}
    return row
