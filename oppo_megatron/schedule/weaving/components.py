"""The part of a site that one rank's schedule depends on, its tensor ranks taken as one.

Ranks are *tied* where a replica of a role lies on both.  What is tied to a rank, directly or through others, is its
component: a generator gives the rank the same list from its component as from the whole, because nothing outside takes
time of the component's ranks.  So a rank plans a component, whose size does not grow with the number of replicas.

Ranks with the same replica and stage of every role are one *class*.  A generator puts the same actions at the same times
on all of them, as it places by stage.  So a component is planned and checked with one rank for each class (the *model*),
and a rank carries out the compute actions of its class, with messages between ranks of its own shard.

What is proved of the model holds for the component, and what is proved of every component for the whole:

- The lists of a class differ in the ranks' numbers alone.  Shards are divided into classes alike in all stages, and
  messages stay within a shard, so a message of the model stands for one of each shard of its class: it has its other end,
  in the same order, in the component as in the model.  Ranks of a class have one list, and so meet at every action.
- Components share no rank and no message but those that end a round's lists: the gather of the actor's replicas, then the
  chunk's messages.  Behind them nothing is awaited, so if each component comes to its end up to there, all ranks of the
  actor reach the gather, and those that send chunks their sends, which never wait.  A listener waits for one rank, which is
  of the actor or a listener before it in the order of `Site.feeds`, so each gets its message and passes it on.  Every list
  of the model ends in the same way, with the model's own gather and listeners.
- Caches belong to replicas, and a replica lies in one component.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TypeVar

from oppo_megatron.layout.placements import RankCoordinates, RolePlacement
from oppo_megatron.schedule.actions import Action, Schedule
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.communication import messages_of
from oppo_megatron.schedule.weaving.timetable import Count, OwnUnits, Team, Timetable

T = TypeVar("T")


@dataclass(frozen=True)
class Component:
    """The component of `rank` in `site`: the numbers of its replicas by role, ascending, and its model.

    `member` is the rank of the model that stands for `rank`.
    """

    site: Site
    rank: int
    replicas: Mapping[str, tuple[int, ...]]
    model: Site
    member: int

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks of the component, in the site."""
        held = ((self.site.placements[role], own) for role, own in self.replicas.items())
        return frozenset(rank for placement, own in held for d in own for rank in placement.replica_ranks(d))

    @cached_property
    def _units(self) -> OwnUnits:
        return OwnUnits(self.site, self.rank)

    def part(self, round: Round) -> Round:
        """What the component has to do of the round, on the model."""

        def keep(role: str, replicas: Sequence[T], none: T) -> tuple[T, ...]:
            return tuple(replicas[d] if d < len(replicas) else none for d in self.replicas[role])

        prefill = {role: keep(role, replicas, ()) for role, replicas in round.prefill.items() if role in self.replicas}
        forks = {role: keep(role, replicas, ()) for role, replicas in round.forks.items() if role in self.replicas}
        decode = keep("actor", round.decode, ()) if "actor" in self.replicas else ()
        return replace(round, decode=decode, prefill=prefill, forks=forks)

    def own_list(self, model: Schedule, shape: Round) -> tuple[Action, ...]:
        """What the rank does: the list of `member` in `model`, a schedule of compute actions of `shape`, with the rank's number
        and its messages.
        """
        times = model.actions
        if isinstance(times, Timetable):
            return self._spelled(*times.order(self.member), shape)
        own = (Action(self.rank, a.op, a.role, a.micro_batch, a.chunk, a.step) for a in model.of(self.member))
        return messages_of(self.rank, Schedule({self.rank: tuple(own)}), shape, self.site)

    def _spelled(
        self, order: Sequence[int], stages: Sequence[tuple[str, RankCoordinates, Count]], shape: Round
    ) -> tuple[Action, ...]:
        """The rank's list, of its stages' units in this order.

        The tokens of the last step and the spread of the chunk, which end it, follow from its decoding in that step.
        """
        units, last = list[tuple[Action, ...]](), list[tuple[Action, ...]]()
        for role, _, count in stages:
            own = self._units.of(role, count)
            units += own
            last += own[len(own) - count.batches :]
        computes = tuple(action for unit in last for action in unit if action.peer is None)
        ends = messages_of(self.rank, Schedule({self.rank: computes}), shape, self.site)[sum(map(len, last)) :]
        return (*chain.from_iterable(map(units.__getitem__, order)), *ends)


def component_of(site: Site, rank: int) -> Component:
    """The component of one of the site's ranks."""
    teams = _tied(site, rank)
    replicas = {role: tuple(sorted(d for name, d in teams if name == role)) for role in site.placements}
    replicas = {role: own for role, own in replicas.items() if own}
    classes = _classes(site, replicas)
    placements = {role: _modelled(site.placements[role], own, classes) for role, own in replicas.items()}
    if "actor" not in placements:  # its output rank stands for it: it sends the chunks
        placements = {"actor": RolePlacement((site.source,))} | placements
    ordered = {role: placements[role] for role in site.placements if role in placements}
    return Component(site, rank, replicas, Site(ordered), classes[rank])


def _tied(site: Site, rank: int) -> set[Team]:
    """The replicas that lie on `rank`, or on a rank of one of them, and so on."""
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
    """For each rank of the component the one that stands for its class: the lowest.

    Every rank stands for itself where classes do not divide the tensor ranks of all stages of a role alike.
    """
    ranks = sorted({rank for role, own in replicas.items() for d in own for rank in site.placements[role].replica_ranks(d)})
    first: dict[tuple[tuple[int, int] | None, ...], int] = {}
    classes = {}
    for rank in ranks:
        coords = [placement.coords(rank) for placement in site.placements.values()]
        classes[rank] = first.setdefault(tuple(None if own is None else own[:2] for own in coords), rank)
    alike = all(len(set(_divisions(site.placements[role], own, classes))) == 1 for role, own in replicas.items())
    return classes if alike else {rank: rank for rank in ranks}


def _divisions(
    placement: RolePlacement, replicas: tuple[int, ...], classes: Mapping[int, int]
) -> Iterator[tuple[int, ...]]:
    """Of each stage of each replica, which shards are of one class: for every shard the first of its class."""
    for replica in replicas:
        for stage in range(placement.pp):
            own = [classes[rank] for rank in placement.stage_ranks(replica, stage)]
            yield tuple(own.index(each) for each in own)


def _modelled(placement: RolePlacement, replicas: tuple[int, ...], classes: Mapping[int, int]) -> RolePlacement:
    """The role's replicas, one rank a class."""
    stages = [
        tuple(dict.fromkeys(classes[rank] for rank in placement.stage_ranks(replica, stage)))
        for stage in range(placement.pp)
        for replica in replicas
    ]
    return RolePlacement(tuple(rank for own in stages for rank in own), len(stages[0]), placement.pp, len(replicas))
