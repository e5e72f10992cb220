"""Start times of all units: decodes with their sample, prefills with their score. Tens of thousands, so actions are lazy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.layout.placements import RankCoordinates, RolePlacement
from oppo_megatron.schedule.actions import Action, Op
from oppo_megatron.schedule.rounds import Round, Site

Team = tuple[str, int]
"""(role, replica)"""

Units = list[tuple[Action, ...]]
"""The actions of each unit of a stage."""


class Times(NamedTuple):
    starts: Ints
    placed: Ints


class Count(NamedTuple):
    prefills: int
    batches: int
    steps: int
    chunk: int

    @property
    def units(self) -> int:
        return self.prefills + self.batches * self.steps


def count_of(team: Team, round: Round) -> Count:
    role, replica = team

    def batches(replicas: Sequence[Sequence[object]]) -> int:
        return len(replicas[replica]) if replica < len(replicas) else 0

    decode = batches(round.decode) if role == "actor" else 0
    chunk = round.index if role == "actor" else round.index - 1
    return Count(batches(round.prefill.get(role, ())), decode, round.steps if decode else 0, chunk)


@dataclass(frozen=True, eq=False)
class Timetable(Mapping[int, tuple[Action, ...]]):
    """Compute actions of all ranks, by start (ties: placement)."""

    round: Round
    site: Site
    times: Mapping[Team, Times]

    def __getitem__(self, rank: int) -> tuple[Action, ...]:
        units: Units = []
        for role, coords, count in self._stages(rank):
            what: list[tuple[int, int, int | None]] = [(j, count.chunk, None) for j in range(count.prefills)]
            what += [(m, count.chunk, step) for step in range(count.steps) for m in range(count.batches)]
            units += [_computes(rank, role, self.site.placements[role], coords, each) for each in what]
        if not units:
            raise KeyError(rank)
        return tuple(chain.from_iterable(map(units.__getitem__, self.sequence(rank)[0].tolist())))

    def __iter__(self) -> Iterator[int]:
        return (rank for rank in self.site.ranks if any(count.units for _, _, count in self._stages(rank)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def count(self, team: Team) -> Count:
        return count_of(team, self.round)

    def sequence(self, rank: int) -> tuple[Ints, list[tuple[Team, int]]]:
        """Order of the rank's units, numbered through its stages (prefills first), and those (team, stage)."""
        own = [((role, coords.replica), coords.stage) for role, coords, _ in self._stages(rank)]
        if not own:
            return np.zeros(0, dtype=np.int64), []
        starts = np.concatenate([self.times[team].starts[stage] for team, stage in own])
        placed = np.concatenate([self.times[team].placed[stage] for team, stage in own])
        order = np.argsort(starts, kind="stable")
        in_time = starts[order]
        if (in_time[1:] == in_time[:-1]).any():
            order = np.lexsort((placed, starts))
        return order, own

    def _stages(self, rank: int) -> list[tuple[str, RankCoordinates, Count]]:
        found = [(role, placement.coords(rank)) for role, placement in self.site.placements.items()]
        return [
            (role, coords, self.count((role, coords.replica)))
            for role, coords in found
            if coords is not None and (role, coords.replica) in self.times
        ]


def _computes(
    rank: int, role: str, placement: RolePlacement, coords: RankCoordinates, what: tuple[int, int, int | None]
) -> tuple[Action, ...]:
    micro_batch, chunk, step = what
    first = Action(rank, Op.PREFILL if step is None else Op.DECODE, role, micro_batch, chunk, step)
    if coords.stage < placement.pp - 1 or (step is None and role == "actor"):
        return (first,)
    return first, Action(rank, Op.SCORE if step is None else Op.SAMPLE, role, micro_batch, chunk, step)
