"""The part of a site that a rank's schedule depends on, the start times of its units, and its messages.

A *component* is all ranks tied by shared replicas, directly or through others. Ranks with the same replica and stage of every
role are a *class*; the *model*, which is planned and checked, has one of each. Its proof holds for every shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import NamedTuple, TypeVar

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.layout.placements import RankCoordinates, RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.rounds import Round, Site

Team = tuple[str, int]
"""(role, replica)"""


class Times(NamedTuple):
    starts: Ints  # [stages, units]
    placed: Ints  # order among units that start together


class Count(NamedTuple):
    prefills: int
    batches: int
    steps: int
    chunk: int

    @property
    def units(self) -> int:
        return self.prefills + self.batches * self.steps  # a unit: a prefill, or a decode step, of one micro-batch


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


def add_communication(schedule: Schedule, round: Round, site: Site) -> Schedule:
    """Sends come directly after their source, receives directly before their use, the gather and the whole chunk last."""
    lists = {rank: messages_of(rank, schedule, round, site) for rank in site.ranks}
    return Schedule({rank: own for rank, own in lists.items() if own})


def messages_of(
    rank: int, schedule: Schedule, round: Round, site: Site, known: dict[Action, tuple[Action, ...]] | None = None
) -> tuple[Action, ...]:
    """Return the rank's list with its messages. `known` caches each action's messages."""
    placements, own = site.placements, schedule.of(rank)
    coords_by_role = {role: placement.coords(rank) for role, placement in placements.items()}
    known = {} if known is None else known
    actions: list[Action] = []
    for action in own:
        if action not in known:
            coords = coords_by_role.get(action.role)
            known[action] = (action,) if coords is None else tuple(with_messages(action, placements[action.role], coords))
        actions += known[action]
    actor, coords = placements["actor"], coords_by_role["actor"]
    if coords is not None and coords.stage < actor.pp - 1:
        source = actor.rank(coords.replica, actor.pp - 1, coords.shard)
        last = {action.micro_batch: action for action in own if action.op is Op.DECODE}
        actions += [_message(action, Op.RECV, Payload.TOKENS, source, action.step) for action in last.values()]
    if round.decodes:
        chunk = "actor", 0, round.index
        if coords is None:
            actions.append(Action(rank, Op.RECV, *chunk, payload=Payload.CHUNK, peer=site.fed_by[rank]))
        elif actor.dp > 1:
            actions.append(Action(rank, Op.GATHER, *chunk))
        actions += [Action(rank, Op.SEND, *chunk, payload=Payload.CHUNK, peer=other) for other in site.feeds.get(rank, ())]
    return tuple(actions)


def with_messages(action: Action, placement: RolePlacement, coords: RankCoordinates) -> Iterator[Action]:
    replica, stage, shard = coords
    last = placement.pp - 1
    if action.op in (Op.DECODE, Op.PREFILL):
        if action.op is Op.DECODE and action.step and stage < last:
            yield _message(action, Op.RECV, Payload.TOKENS, placement.rank(replica, last, shard), action.step - 1)
        if stage > 0:
            yield _message(action, Op.RECV, Payload.HIDDEN, placement.rank(replica, stage - 1, shard), action.step)
    yield action
    if action.op in (Op.DECODE, Op.PREFILL) and stage < last:
        yield _message(action, Op.SEND, Payload.HIDDEN, placement.rank(replica, stage + 1, shard), action.step)
    if action.op is Op.SAMPLE:
        for other in range(last):
            yield _message(action, Op.SEND, Payload.TOKENS, placement.rank(replica, other, shard), action.step)


def _message(action: Action, op: Op, payload: Payload, peer: int, step: int | None) -> Action:
    return Action(action.rank, op, action.role, action.micro_batch, action.chunk, step, payload, peer)


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
    return Component(site, rank, replicas, Site(ordered), classes.get(rank, rank))


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
