"""Ranks that do the same at the same time are one unit: those of a replica, however many stages and shards it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from oppo_megatron.columns import Bools, Ints
from oppo_megatron.schedule.rounds import Site

NONE = -1


@dataclass(frozen=True)
class Units:
    """Sets of ranks that hold the same replicas of the same roles; U of them, by their first ranks.

    `replicas` [U]: by role, the replica that a unit is part of, NONE where it has none.  `hops` [U]: messages that bring a
    chunk; 0 where it is decoded.  `ranks` [U]: how many they are, `first` [U] the first of them.  `source` is the unit of the
    actor's output rank, `scorer` that whose scoring is told of: of the critic's first rank, without a critic of the first
    scorer's.
    """

    replicas: Mapping[str, Ints]
    hops: Ints
    ranks: Ints
    first: Ints
    source: int
    scorer: int

    def __len__(self) -> int:
        return len(self.first)

    def holds(self, role: str) -> Bools:
        """Which units have a part of a role, and make its update where it is trained."""
        found: Bools = self.replicas[role] != NONE if role in self.replicas else np.zeros(len(self), dtype=np.bool_)
        return found

    @classmethod
    def of(cls, site: Site, *, single: bool = False) -> Units:
        """`single`: each rank is a unit of its own."""
        keys: dict[tuple[object, ...], int] = {}
        unit_of: dict[int, int] = {}
        members: list[list[int]] = []
        for rank in site.ranks:
            coords = [placement.coords(rank) for placement in site.placements.values()]
            held = tuple(NONE if each is None else each.replica for each in coords)
            key = (held, rank) if single else (held, _hops(site, rank))
            unit_of[rank] = keys.setdefault(key, len(keys))
            if unit_of[rank] == len(members):
                members.append([])
            members[unit_of[rank]].append(rank)
        first = [ranks[0] for ranks in members]
        return cls(
            {role: _replicas(site, role, first) for role in site.placements},
            np.array([_hops(site, rank) for rank in first], dtype=np.int64),
            np.array([len(ranks) for ranks in members], dtype=np.int64),
            np.array(first, dtype=np.int64),
            unit_of[site.source],
            unit_of[_told_of(site)],
        )


def _replicas(site: Site, role: str, ranks: list[int]) -> Ints:
    coords = [site.placements[role].coords(rank) for rank in ranks]
    return np.array([NONE if each is None else each.replica for each in coords], dtype=np.int64)


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
