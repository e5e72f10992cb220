"""Start times of all units: decodes with their sample, prefills with their score. Tens of thousands, so actions are lazy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.layout.placements import RankCoordinates
from oppo_megatron.schedule.actions import Action, Op
from oppo_megatron.schedule.rounds import Round, Site

Team = tuple[str, int]
"""(role, replica)"""


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
        units: list[tuple[Action, ...]] = []
        for role, coords, count in self._stages(rank):
            is_last = coords.stage == self.site.placements[role].pp - 1
            for j in range(count.prefills):
                prefill = Action(rank, Op.PREFILL, role, j, count.chunk)
                scored = is_last and role != "actor"
                units.append((prefill, Action(rank, Op.SCORE, role, j, count.chunk)) if scored else (prefill,))
            for step, m in product(range(count.steps), range(count.batches)):
                decode = Action(rank, Op.DECODE, role, m, count.chunk, step)
                units.append((decode, Action(rank, Op.SAMPLE, role, m, count.chunk, step)) if is_last else (decode,))
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
