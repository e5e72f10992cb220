"""The part of a site that a rank's schedule depends on.

A *component* is all ranks tied by shared replicas, directly or through others. Ranks with the same replica and stage of every
role are a *class*; the *model*, which is planned and checked, has one of each. Its proof holds for every shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import TypeVar

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Action, Schedule
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.communication import messages_of
from oppo_megatron.schedule.weaving.timetable import Team

T = TypeVar("T")


@dataclass(frozen=True)
class Component:
    """In the model, `member` represents `rank`."""

    site: Site
    rank: int
    replicas: Mapping[str, tuple[int, ...]]
    model: Site
    member: int
    _known: dict[Action, tuple[Action, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def ranks(self) -> frozenset[int]:
        held = ((self.site.placements[role], own) for role, own in self.replicas.items())
        return frozenset(rank for placement, own in held for d in own for rank in placement.replica_ranks(d))

    def part(self, round: Round) -> Round:
        def keep(role: str, replicas: Sequence[T], none: T) -> tuple[T, ...]:
            return tuple(replicas[d] if d < len(replicas) else none for d in self.replicas[role])

        prefill = {role: keep(role, replicas, ()) for role, replicas in round.prefill.items() if role in self.replicas}
        forks = {role: keep(role, replicas, ()) for role, replicas in round.forks.items() if role in self.replicas}
        decode = keep("actor", round.decode, ()) if "actor" in self.replicas else ()
        return replace(round, decode=decode, prefill=prefill, forks=forks)

    def own_list(self, model: Schedule, shape: Round) -> tuple[Action, ...]:
        own = (Action(self.rank, a.op, a.role, a.micro_batch, a.chunk, a.step) for a in model.of(self.member))
        return messages_of(self.rank, Schedule({self.rank: tuple(own)}), shape, self.site, self._known)


def component_of(site: Site, rank: int) -> Component:
    teams = _tied(site, rank)
    replicas = {role: tuple(sorted(d for name, d in teams if name == role)) for role in site.placements}
    replicas = {role: own for role, own in replicas.items() if own}
    classes = _classes(site, replicas)
    placements = {}
    for role, own in replicas.items():
        whole = site.placements[role]
        stages = [
            tuple(dict.fromkeys(classes[rank] for rank in whole.stage_ranks(replica, stage)))
            for stage, replica in product(range(whole.pp), own)
        ]
        placements[role] = RolePlacement(tuple(chain.from_iterable(stages)), len(stages[0]), whole.pp, len(own))
    if "actor" not in placements:  # its output rank represents it, since it sends the chunks
        placements = {"actor": RolePlacement((site.source,))} | placements
    ordered = {role: placements[role] for role in site.placements if role in placements}
    return Component(site, rank, replicas, Site(ordered), classes[rank])


def _tied(site: Site, rank: int) -> set[Team]:
    found: set[Team] = set()
    seen, left = {rank}, [rank]
    while left:
        here = left.pop()
        for role, placement in site.placements.items():
            coords = placement.coords(here)
            if coords is not None and (role, coords.replica) not in found:
                found.add((role, coords.replica))
                new = set(placement.replica_ranks(coords.replica)) - seen
                seen |= new
                left += new
    return found


def _classes(site: Site, replicas: Mapping[str, tuple[int, ...]]) -> dict[int, int]:
    """Map each rank to the lowest of its class, or to itself if classes divide stages unequally."""
    ranks = sorted({rank for role, own in replicas.items() for d in own for rank in site.placements[role].replica_ranks(d)})
    first: dict[tuple[tuple[int, int] | None, ...], int] = {}
    classes = {}
    for rank in ranks:
        coords = [placement.coords(rank) for placement in site.placements.values()]
        classes[rank] = first.setdefault(tuple(None if own is None else own[:2] for own in coords), rank)
    for role, own_replicas in replicas.items():
        placement, divisions = site.placements[role], set[tuple[int, ...]]()
        for replica, stage in product(own_replicas, range(placement.pp)):
            own_classes = [classes[rank] for rank in placement.stage_ranks(replica, stage)]
            divisions.add(tuple(own_classes.index(each) for each in own_classes))
        if len(divisions) > 1:
            return {rank: rank for rank in ranks}
    return classes
