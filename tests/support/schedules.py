"""Rounds and sites for schedules, a builder of sound schedules that shares nothing with the generators, and NCCL's first use."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.links import Link, lanes_of
from oppo_megatron.schedule.rounds import Batch, Growth, KVBudget, Round, Site

LAYOUTS = [(tp, pp, dp) for tp in (1, 2) for pp in (1, 2, 4) for dp in (1, 2)]


def make_site(actor: tuple[int, int, int], scorers: Mapping[str, tuple[int, int, int, int]]) -> Site:
    """Actor (tp, pp, dp) on ranks 0..; each scorer (first rank, tp, pp, dp)."""
    placements = {"actor": RolePlacement(tuple(range(actor[0] * actor[1] * actor[2])), *actor)}
    for role, (first, tp, pp, dp) in scorers.items():
        placements[role] = RolePlacement(tuple(range(first, first + tp * pp * dp)), tp, pp, dp)
    return Site(placements)


def colocated(actor: tuple[int, int, int]) -> Site:
    return make_site(actor, {role: (0, *actor) for role in ("reference", "critic", "reward")})


def disaggregated(actor: tuple[int, int, int], scorer: tuple[int, int, int]) -> Site:
    first = actor[0] * actor[1] * actor[2]
    return make_site(actor, {role: (first, *scorer) for role in ("reference", "critic", "reward")})


def split_scorers(actor: tuple[int, int, int]) -> Site:
    first = actor[0] * actor[1] * actor[2]
    return make_site(actor, {"critic": (0, *actor), "reference": (first, 1, 2, 1), "reward": (first + 2, 1, 1, 1)})


def make_round(
    site: Site, steps: int = 3, micro_batches: int = 2, prefills: int = 2, prompts: int = 1, sequences: int = 2, index: int = 2
) -> Round:
    actor = site.placements["actor"]
    ids = iter(range(10_000))

    def batches(count: int, new: int, past: int, rows: int = 0) -> tuple[Batch, ...]:
        return tuple(tuple(Growth(next(ids), past, new, rows) for _ in range(sequences)) for _ in range(count))

    decode = tuple(batches(micro_batches, steps, 5) for _ in range(actor.dp))
    # the first decode micro-batches begin with prompts
    prompted = tuple(tuple(tuple(Growth(g.seq_id, 0, g.past) for g in batch) for batch in own[:prompts]) for own in decode)
    prefill = {role: tuple(batches(prefills, 4, 6, 4) for _ in range(p.dp)) for role, p in site.placements.items()}
    return Round(index, steps, decode if steps else (), prefill | {"actor": prompted if steps else ()})


def links_of(site: Site) -> list[Link]:
    return [link for lane in lanes_of(site) for link in lane.links]


def ample_budgets(site: Site) -> dict[str, list[KVBudget]]:
    return {role: [KVBudget(10_000, 10_000)] * placement.dp for role, placement in site.placements.items()}


@dataclass
class _Task:
    """Actions that follow each other directly on each rank, and the names of the tasks they depend on."""

    actions: list[Action] = field(default_factory=list)
    after: list[object] = field(default_factory=list)


def build(round_: Round, site: Site, rng: random.Random | None = None) -> Schedule:
    """A sound schedule.  With `rng` a random one, else decoding first."""
    tasks: dict[object, _Task] = {}
    for replica, batches in enumerate(round_.decode):
        tasks |= _decoding(round_, site.placements["actor"], replica, batches)
    for role, replicas in round_.prefill.items():
        chunk = round_.index if role == "actor" else round_.index - 1
        for replica, batches in enumerate(replicas):
            tasks |= _prefills(site.placements[role], role, replica, len(batches), chunk)
    lists: dict[int, list[Action]] = {rank: [] for placement in site.placements.values() for rank in placement.ranks}
    for action in [*_in_order(tasks, rng), *_spread(round_, site)]:
        lists[action.rank].append(action)
    return Schedule({rank: tuple(own) for rank, own in lists.items()})


def _in_order(tasks: dict[object, _Task], rng: random.Random | None) -> Iterator[Action]:
    left, done = dict(tasks), set()
    while left:
        ready = [name for name, task in left.items() if done.issuperset(n for n in task.after if n in tasks)]
        name = rng.choice(ready) if rng else ready[0]
        yield from left.pop(name).actions
        done.add(name)


def _decoding(round_: Round, placement: RolePlacement, replica: int, batches: Sequence[Batch]) -> dict[object, _Task]:
    tasks: dict[object, _Task] = {}
    last, name = placement.pp - 1, ("decode", replica)
    prompts = [("prefill", "actor", replica, j, p) for j in range(len(batches)) for p in range(placement.pp)]
    order = [(step, m) for step in range(round_.steps) for m in range(len(batches))]
    for number, (step, m) in enumerate(order):
        for stage in range(placement.pp):
            after = [(*name, *order[number - 1], stage)] if number else []
            after += [(*name, step, m, stage - 1)] if stage else [(*name, step - 1, m, last)]
            task = tasks[(*name, step, m, stage)] = _Task(after=[*after, *prompts])
            for shard, rank in enumerate(placement.stage_ranks(replica, stage)):
                key = ("actor", m, round_.index)
                drawing = placement.rank(replica, last, shard)
                if step and stage < last:
                    task.actions.append(Action(rank, Op.RECV, *key, step - 1, Payload.TOKENS, drawing))
                if stage:
                    before = placement.rank(replica, stage - 1, shard)
                    task.actions.append(Action(rank, Op.RECV, *key, step, Payload.HIDDEN, before))
                task.actions.append(Action(rank, Op.DECODE, *key, step))
                if stage < last:
                    behind = placement.rank(replica, stage + 1, shard)
                    task.actions.append(Action(rank, Op.SEND, *key, step, Payload.HIDDEN, behind))
                else:
                    task.actions.append(Action(rank, Op.SAMPLE, *key, step))
                    for other in range(last):
                        to = placement.rank(replica, other, shard)
                        task.actions.append(Action(rank, Op.SEND, *key, step, Payload.TOKENS, to))
    for stage in range(last):
        final = [(*name, round_.steps - 1, m, last) for m in range(len(batches))]
        task = tasks[(*name, "final", stage)] = _Task(after=final)
        for shard, rank in enumerate(placement.stage_ranks(replica, stage)):
            drawing = placement.rank(replica, last, shard)
            for m in range(len(batches)):
                received = Action(rank, Op.RECV, "actor", m, round_.index, round_.steps - 1, Payload.TOKENS, drawing)
                task.actions.append(received)
    return tasks


def _prefills(placement: RolePlacement, role: str, replica: int, count: int, chunk: int) -> dict[object, _Task]:
    tasks: dict[object, _Task] = {}
    name = ("prefill", role, replica)
    for j in range(count):
        for stage in range(placement.pp):
            task = tasks[(*name, j, stage)] = _Task(after=[(*name, j - 1, stage), (*name, j, stage - 1)])
            for shard, rank in enumerate(placement.stage_ranks(replica, stage)):
                key = (role, j, chunk)
                if stage:
                    before = placement.rank(replica, stage - 1, shard)
                    task.actions.append(Action(rank, Op.RECV, *key, None, Payload.HIDDEN, before))
                task.actions.append(Action(rank, Op.PREFILL, *key))
                if stage < placement.pp - 1:
                    behind = placement.rank(replica, stage + 1, shard)
                    task.actions.append(Action(rank, Op.SEND, *key, None, Payload.HIDDEN, behind))
                elif role != "actor":
                    task.actions.append(Action(rank, Op.SCORE, *key))
    return tasks


def _spread(round_: Round, site: Site) -> Iterator[Action]:
    if not round_.steps:
        return
    if site.placements["actor"].dp > 1:
        yield from (Action(rank, Op.GATHER, "actor", 0, round_.index) for rank in site.placements["actor"].ranks)
    key = ("actor", 0, round_.index, None, Payload.CHUNK)
    for sender, listeners in site.feeds.items():
        for listener in listeners:
            yield Action(sender, Op.SEND, *key, listener)
            yield Action(listener, Op.RECV, *key, sender)


T = TypeVar("T", bound=Hashable)


def turns(lists: Mapping[int, Sequence[T]], members: Callable[[T], Collection[int]]) -> int | None:
    """Turns in which each rank gets through its list, one use at most in each; None where some never do."""
    at, number = dict.fromkeys(lists, 0), 0
    while any(at[rank] < len(own) for rank, own in lists.items()):
        here = Counter(own[at[rank]] for rank, own in lists.items() if at[rank] < len(own))
        met = [each for each, present in here.items() if present == len(members(each))]
        if not met:
            return None
        for each in met:
            for rank in members(each):
                at[rank] += 1
        number += 1
    return number
