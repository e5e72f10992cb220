"""Enumerate plans: blocks by lower bound until no others can be among the best, layouts role by role."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from oppo_megatron.sim.search.blocks import TRAINERS, Blocks, Mode, StepRule, Times, Trainers
from oppo_megatron.sim.search.layouts import Bytes, Option, PriceTable

ROWS_AT_ONCE = 64
Bounds = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Plan:
    """The actor's block and layout come first."""

    blocks: Blocks
    options: tuple[Option, ...]
    step_ns: int
    fullest_bytes: int
    micro_batch_tokens: int = 0

    @property
    def key(self) -> object:
        actor = self.options[0]
        return key_of(self.blocks, actor, actor if actor.train else self.options[-1])


def key_of(blocks: Blocks, actor: Option, trained: Option) -> object:
    """Plans of equal keys differ in scorers, recomputation, micro-batches, and in other ranks, of equal number, that train."""
    return blocks[0], len(blocks), actor.serving, trained.serving.num_ranks, trained.training and trained.training[:3]


class Best:
    def __init__(self, keep: int):
        self.keep, self.plans = keep, list[Plan]()
        self._by_key: dict[object, int] = {}
        self._limit = float("inf")

    def limit(self, key: object = None) -> float:
        return self._by_key.get(key, self._limit)

    def add(self, plan: Plan) -> None:
        others = [each for each in self.plans if each.key != plan.key]
        self.plans = sorted([*others, plan], key=lambda each: each.step_ns)[: self.keep]
        self._by_key = {each.key: each.step_ns for each in self.plans}
        self._limit = self.plans[-1].step_ns if len(self.plans) >= self.keep else float("inf")


@dataclass(frozen=True)
class Space:
    """`trainers`: the last blocks of places, beyond all others and of the fastest update, stand for all of theirs."""

    prices: PriceTable
    places: Sequence[Blocks]
    mode: Mode
    budget: int
    accepts: Callable[[Plan], bool] = lambda plan: True
    micro_batch_tokens: int = 0
    trainers: Trainers | None = None
    _layouts: dict[tuple[str, int], _Layouts] = field(default_factory=dict)

    def closed(self, numbers: Iterable[int]) -> Space:
        """Return places, by number, with every block of trainers."""
        if self.trainers is None:
            return replace(self, places=[self.places[number] for number in numbers])
        places = [(*place[:-1], block) for place in map(self.places.__getitem__, numbers) for block in self.trainers.of(place)]
        return replace(self, places=places, trainers=None)

    def layouts(self, blocks: Blocks) -> list[_Layouts]:
        found = []
        for key in zip(self.prices.roles, (block.size for block in blocks), strict=True):
            if key not in self._layouts:
                self._layouts[key] = _Layouts(self.prices.front(*key))
            found.append(self._layouts[key])
        return found


class _Layouts:
    """`times` [option], `kinds` [option, kind, piece]."""

    def __init__(self, options: Sequence[Option]):
        self.options = options
        if options:
            columns = zip(*(option.times for option in options), strict=True)
            self.times = Times(*(np.array(column, dtype=np.int64) for column in columns))
            self.least = Times(*(int(column.min()) for column in self.times))
            self.pieces = lcm(*(option.memory.shape[1] for option in options))
            self.kinds = np.stack([option.over(self.pieces) for option in options])
            self.lasting = self.kinds[:, 0].min(axis=0)


def enumerate_plans(space: Space, best: Best, *, any_plan: bool = False) -> None:
    """Put the best plans of `space` into `best`. `any_plan`: stop at the first."""
    if any_plan and best.plans:
        return
    bounds = lower_bounds(space)
    near = np.flatnonzero(bounds < best.limit())
    if space.trainers is not None:
        enumerate_plans(space.closed(near.tolist()), best, any_plan=any_plan)
        return
    for number in near[np.argsort(bounds[near], kind="stable")].tolist():
        if bounds[number] >= best.limit() or (any_plan and best.plans):
            return
        blocks = space.places[number]
        layouts = space.layouts(blocks)
        if all(each.options for each in layouts):
            _Chooser(space, blocks, layouts, best).choose()


def lower_bounds(space: Space) -> Bounds:
    """Price that no plan of a place undercuts; infinite without a layout."""
    found: Bounds = np.full(len(space.places), np.inf)
    if not space.places:
        return found
    table = np.array([[(block.first, block.size) for block in each] for each in space.places], dtype=np.int64)
    times, known = list[Times](), np.ones(len(table), dtype=bool)
    for role, name in enumerate(space.prices.roles):
        distinct, place = np.unique(table[:, role, 1], return_inverse=True)
        least = [space.prices.least(name, int(size)) for size in distinct]
        known &= np.array([each is not None for each in least])[place]
        times.append(Times(*np.array([each or Times(0) for each in least], dtype=np.int64)[place].T))
    first, end = table[:, :, 0], table.sum(axis=2)
    contains = (first[:, :, None] <= first[:, None, :]) & (end[:, None, :] <= end[:, :, None])
    _, pattern = np.unique(np.packbits(contains.reshape(len(table), -1), axis=1), axis=0, return_inverse=True)
    for number in range(int(pattern.max()) + 1):
        rows = np.flatnonzero((pattern.reshape(-1) == number) & known)
        if len(rows):
            own = [Times(*(column[rows] for column in each)) for each in times]
            found[rows] = StepRule(space.prices.roles, space.places[rows[0]], space.mode).step_ns(own)
    return found


class _Chooser:
    def __init__(self, space: Space, blocks: Blocks, layouts: Sequence[_Layouts], best: Best):
        self.space, self.blocks, self.layouts, self.best = space, blocks, layouts, best
        roles = space.prices.roles
        self.rule = StepRule(roles, blocks, space.mode)
        self.keyed = roles.index(TRAINERS) if TRAINERS in roles else 0
        self.order = sorted(range(len(roles)), key=lambda role: (role != 0, role != self.keyed, roles[role] != "critic", role))
        edges = {
            block.first + piece * block.size // own.pieces
            for block, own in zip(blocks, layouts, strict=True)
            for piece in range(own.pieces)
        } | {block.end for block in blocks}
        # The first rank of each run of ranks on which every layout has the same pieces.
        starts = np.array(sorted(edges - {max(block.end for block in blocks)}), dtype=np.int64)
        self.inside = [(starts >= block.first) & (starts < block.end) for block in blocks]
        self.piece = [
            (starts[inside] - block.first) * own.pieces // block.size
            for inside, block, own in zip(self.inside, blocks, layouts, strict=True)
        ]
        needed = np.zeros(len(starts), dtype=np.int64)
        self.open = [needed]  # by number of chosen roles: bytes that the other roles hold at least
        for role in reversed(self.order):
            needed = needed.copy()
            needed[self.inside[role]] += layouts[role].lasting[self.piece[role]]
            self.open.insert(0, needed)

    def choose(self) -> None:
        least = [own.least for own in self.layouts]
        if self.rule.step_ns(least) < self.best.limit() and self.open[0].max() <= self.space.budget:
            self._choose(0, least, {}, np.zeros((3, len(self.open[0])), dtype=np.int64), None)

    def _choose(self, depth: int, times: list[Times], chosen: dict[int, Option], held: Bytes, key: Any) -> None:
        """`times` of chosen layouts, else the least; `held`: their bytes, [kind, run of ranks]."""
        role, last = self.order[depth], depth + 1 == len(self.order)
        layouts = self.layouts[role]
        bounds = self.rule.step_ns([*times[:role], layouts.times, *times[role + 1 :]])
        bounds = np.broadcast_to(bounds, len(layouts.options))
        rows = np.flatnonzero(bounds < self.best.limit(key))
        rows = rows[np.argsort(bounds[rows], kind="stable")]
        for row, now in self._fitting(role, rows, held, self.open[depth + 1]):
            option, bound_ns = layouts.options[row], int(bounds[row])
            own = key_of(self.blocks, chosen[0] if role else option, option) if role == self.keyed else key
            if bound_ns >= self.best.limit(own):
                continue
            chosen[role] = option
            if not last:
                self._choose(depth + 1, [*times[:role], option.times, *times[role + 1 :]], chosen, now, own)
                continue
            options, fullest = tuple(chosen[each] for each in range(len(self.blocks))), int(now.sum(axis=0).max())
            plan = Plan(self.blocks, options, bound_ns, fullest, self.space.micro_batch_tokens)
            if self.space.accepts(plan):
                self.best.add(plan)
                return

    def _fitting(self, role: int, rows: Any, held: Bytes, still: Bytes) -> Iterator[tuple[int, Bytes]]:
        """Yield options of `rows` that leave room for `still`, with the bytes held then."""
        inside, budget = self.inside[role], self.space.budget
        outside = (held.sum(axis=0) + still)[~inside]
        if outside.size and outside.max() > budget:
            return
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            own = self.layouts[role].kinds[some][:, :, self.piece[role]]
            lasting, passing = held[0, inside] + own[:, 0], np.maximum(held[1:, inside], own[:, 1:])
            fits = (lasting + passing.sum(axis=1) + still[inside]).max(axis=1) <= budget
            for place in np.flatnonzero(fits).tolist():
                now = held.copy()
                now[0, inside], now[1:, inside] = lasting[place], passing[place]
                yield int(some[place]), now


def held_bytes(blocks: Blocks, options: Sequence[Option]) -> Bytes:
    """Bytes on each rank, [kind, rank]."""
    held = np.zeros((3, max(block.end for block in blocks)), dtype=np.int64)
    for block, option in zip(blocks, options, strict=True):
        own, ranks = option.over(block.size), slice(block.first, block.end)
        held[0, ranks] += own[0]
        held[1:, ranks] = np.maximum(held[1:, ranks], own[1:])
    return held
