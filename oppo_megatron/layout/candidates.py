"""Placements that `placement.mode: auto` measures on W ranks:

    single           one process; on CUDA only if there is one device
    disaggregated    actor | scorers: W-1 | 1, three quarters | one, half | half; on CPU also 1 | 1 with W/2 threads each
    colocated        all roles on W ranks

Each with the least and the largest tensor parallelism, without pipelines; the former also with the reference on the actor's
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from oppo_megatron.config.model import ParallelConfig, PlacementConfig, PlacementMode
from oppo_megatron.config.run import TrainSettings
from oppo_megatron.cores import asked_threads
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.checks import check_layouts
from oppo_megatron.layout.layouts import divisors
from oppo_megatron.layout.placements import named_roles
from oppo_megatron.modeldir.headers import read_hf_config

BESIDE = " (reference: actor)"

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
        """Such as `disaggregated 1 | 1 (reference: actor)`."""
        placement = self.placement
        if placement.mode == "single":
            return "single"
        actor, scorer = _sizes(placement.actor), _sizes(placement.scorer or ParallelConfig())
        if placement.mode == "colocated":
            return f"colocated {actor}"
        return f"disaggregated {actor} | {scorer}{BESIDE * (placement.reference == 'actor')}"

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
            yield from self._fitting(name + BESIDE, [moved])

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
