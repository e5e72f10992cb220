"""Ranks that do the same at the same time are one unit: those of a stage of a replica, however many shards it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oppo_megatron.columns import Bools, Ints
from oppo_megatron.schedule.rounds import Site

NONE = -1

Held = tuple[tuple[int, int] | None, ...]
"""Replica and stage that a rank has of each role."""


@dataclass(frozen=True)
class Units:
    """Sets of ranks that hold the same stages of the same replicas; U of them, by their first ranks.

    `replicas` [U]: by role, the replica that a unit is part of, NONE where it has none.  `hops` [U]: messages that bring a
    chunk; 0 where it is decoded.  `fed` [2, n]: units that are sent chunks, and a unit that sends them, by number of hops.
    `ranks` [U]: how many they are, `first` [U] the first of them.  Units of one `kinds` [U] differ in their hops alone, and
    `kind_of` has those of all ranks.  `source` is the unit of the actor's output rank, `scorer` that whose scoring is told of:
    of the critic's first rank, without a critic of the first scorer's.
    """

    replicas: Mapping[str, Ints]
    hops: Ints
    fed: Ints
    ranks: Ints
    first: Ints
    kinds: Ints
    kind_of: Mapping[int, int]
    source: int
    scorer: int

    def __len__(self) -> int:
        return len(self.first)

    @property
    def num_kinds(self) -> int:
        return int(self.kinds.max()) + 1

    def holds(self, role: str) -> Bools:
        """Which units have a part of a role, and make its update where it is trained."""
        found: Bools = self.replicas[role] != NONE if role in self.replicas else np.zeros(len(self), dtype=np.bool_)
        return found

    @classmethod
    def of(cls, site: Site, *, single: bool = False) -> Units:
        """`single`: each rank is a unit of its own."""
        held, hops = {rank: _held(site, rank) for rank in site.ranks}, {rank: _hops(site, rank) for rank in site.ranks}
        keys: dict[tuple[object, ...], int] = {}
        unit_of: dict[int, int] = {}
        members: list[list[int]] = []
        for rank in site.ranks:
            key = (held[rank], rank) if single else (held[rank], hops[rank])
            unit_of[rank] = keys.setdefault(key, len(keys))
            if unit_of[rank] == len(members):
                members.append([])
            members[unit_of[rank]].append(rank)
        first = [ranks[0] for ranks in members]
        numbers = {each: number for number, each in enumerate(dict.fromkeys(held.values()))}
        kind_of = {rank: numbers[own] for rank, own in held.items()}
        fed = sorted((hops[rank], unit_of[rank], unit_of[sender]) for rank, sender in site.fed_by.items())
        return cls(
            {role: _replicas([held[rank][place] for rank in first]) for place, role in enumerate(site.placements)},
            np.array([hops[rank] for rank in first], dtype=np.int64),
            np.array([pair[1:] for pair in dict.fromkeys(fed)], dtype=np.int64).reshape(-1, 2).T,
            np.array([len(ranks) for ranks in members], dtype=np.int64),
            np.array(first, dtype=np.int64),
            np.array([kind_of[rank] for rank in first], dtype=np.int64),
            kind_of,
            unit_of[site.source],
            unit_of[_told_of(site)],
        )


def _held(site: Site, rank: int) -> Held:
    coords = (placement.coords(rank) for placement in site.placements.values())
    return tuple(None if each is None else (each.replica, each.stage) for each in coords)


def _replicas(held: Sequence[tuple[int, int] | None]) -> Ints:
    return np.array([NONE if each is None else each[0] for each in held], dtype=np.int64)


def _hops(site: Site, rank: int) -> int:
    """Messages from a rank that decodes to this one."""
    hops = 0
    while rank in site.fed_by:
        rank, hops = site.fed_by[rank], hops + 1
    return hops


def _told_of(site: Site) -> int:
    """The critic's first rank, else the first of a scorer, else the actor's output rank."""
    scorers = [role for role in site.placements if role != "actor"]
    role = "critic" if "critic" in scorers else next(iter(scorers), "actor")
    return site.source if role == "actor" else site.placements[role].ranks[0]
