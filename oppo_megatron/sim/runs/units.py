"""Ranks that do the same at the same time are one unit: all shards of a stage of a replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oppo_megatron.columns import Bools, Ints
from oppo_megatron.rundir.trace import Span
from oppo_megatron.schedule.rounds import Site

Floats = npt.NDArray[np.float64]
NONE = -1

Held = tuple[tuple[int, int] | None, ...]
"""Replica and stage that a rank has of each role."""


@dataclass(frozen=True)
class Played:
    """When each unit has ended a round, and its seconds of scoring, [U]; `waited` [U]: seconds of waiting for the chunk.

    `arrived`: when the chunk is complete on the decoding ranks; None if the round only scores.  `spans`: for the trace.
    """

    ends: Floats
    scored: Floats
    waited: Floats
    arrived: float | None
    spans: Callable[[], Iterable[Span]]


@dataclass(frozen=True)
class Units:
    """Sets of ranks that hold the same stages of the same replicas, in the order of their first ranks; there are U.

    `replicas` [U]: by role, the replica that a unit is part of, or NONE.  `hops` [U]: messages that bring a chunk, 0 if it is
    decoded there.  `fed` [2, n]: units that receive chunks and the units that send them, by number of hops.  `first` [U]: the
    first rank of each.  Units of the same `kinds` [U] differ in their hops alone; `kind_of`: the kind of every rank.  `source`:
    unit of the actor's output rank; `scorer`: unit of the critic's first rank, without a critic of the first scorer's.
    """

    replicas: Mapping[str, Ints]
    hops: Ints
    fed: Ints
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
        """True for units that have a part of the role."""
        found: Bools = self.replicas[role] != NONE if role in self.replicas else np.zeros(len(self), dtype=np.bool_)
        return found

    @classmethod
    def of(cls, site: Site, *, single: bool = False) -> Units:
        """Return the units of a site; `single`: each rank is a unit of its own."""
        held, hops = {rank: _held(site, rank) for rank in site.ranks}, {rank: _hops(site, rank) for rank in site.ranks}
        keys: dict[tuple[object, ...], int] = {}
        unit_of = {
            rank: keys.setdefault((held[rank], rank if single else hops[rank]), len(keys)) for rank in site.ranks
        }
        first_of: dict[int, int] = {}
        for rank, unit in unit_of.items():
            first_of.setdefault(unit, rank)
        first = list(first_of.values())
        numbers = {each: number for number, each in enumerate(dict.fromkeys(held.values()))}
        kind_of = {rank: numbers[own] for rank, own in held.items()}
        fed = sorted((hops[rank], unit_of[rank], unit_of[sender]) for rank, sender in site.fed_by.items())
        scorers = [role for role in site.placements if role != "actor"]
        scorer = "critic" if "critic" in scorers else next(iter(scorers), None)
        return cls(
            {
                role: np.array(
                    [NONE if (own := held[rank][place]) is None else own[0] for rank in first], dtype=np.int64
                )
                for place, role in enumerate(site.placements)
            },
            np.array([hops[rank] for rank in first], dtype=np.int64),
            np.array([pair[1:] for pair in dict.fromkeys(fed)], dtype=np.int64).reshape(-1, 2).T,
            np.array(first, dtype=np.int64),
            np.array([kind_of[rank] for rank in first], dtype=np.int64),
            kind_of,
            unit_of[site.source],
            unit_of[site.source if scorer is None else site.placements[scorer].ranks[0]],
        )


def _held(site: Site, rank: int) -> Held:
    coords = (placement.coords(rank) for placement in site.placements.values())
    return tuple(None if each is None else (each.replica, each.stage) for each in coords)


def _hops(site: Site, rank: int) -> int:
    """Messages from a decoding rank to this one."""
    hops = 0
    while rank in site.fed_by:
        rank, hops = site.fed_by[rank], hops + 1
    return hops
