"""Branch and bound over homes and layouts: the plans of least seconds, and proof that none is faster.

Homes are looked at in the order of a bound: a step whose phases each take as little as any layout over so many ranks lets them.
Within homes, layouts are chosen role by role; what a step takes at least, with the least of the roles still open, and what they
hold at least of each rank, cut off the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from typing import Any, NamedTuple, Protocol

import numpy as np

from oppo_megatron.sim.search.homes import Homes
from oppo_megatron.sim.search.options import Bytes, Option
from oppo_megatron.sim.search.step import Mode, StepRule, Times

Clock = Callable[[], bool]
"""Whether time is over."""


def never() -> bool:
    """A clock for searches without an end."""
    return False


def always(plan: Plan) -> bool:
    """Accepts every plan."""
    return True


class Offers(Protocol):
    """What the search chooses from."""

    @property
    def roles(self) -> tuple[str, ...]: ...

    def least(self, role: str, size: int) -> Times | None:
        """No option has a shorter phase; None where there is none."""

    def front(self, role: str, size: int) -> list[Option]:
        """The options that may be part of a best plan."""


@dataclass(frozen=True)
class Plan:
    """Homes and layouts of all roles, with the nanoseconds of a step and the bytes of the fullest rank."""

    homes: Homes
    options: tuple[Option, ...]
    step_ns: int
    fullest_bytes: int

    @property
    def key(self) -> object:
        """What tells plans apart in the list of the best: the actor's home and layouts."""
        return key_of(self.homes, self.options[0])


def key_of(homes: Homes, actor: Option) -> object:
    """`Plan.key`."""
    return homes[0], actor.serving, actor.training and actor.training[:3]


@dataclass(frozen=True)
class Stack:
    """Options of a role over so many ranks as arrays: `times` [option], `kinds` [option, kind, piece]."""

    options: Sequence[Option]

    @cached_property
    def times(self) -> Times:
        return Times(
            *(np.array(column, dtype=np.int64) for column in zip(*(o.times for o in self.options), strict=True))
        )

    @cached_property
    def kinds(self) -> Bytes:
        pieces = lcm(*(option.profile.pieces for option in self.options))
        return np.stack([option.profile.over(pieces) for option in self.options])

    @property
    def pieces(self) -> int:
        return int(self.kinds.shape[2])

    @cached_property
    def least(self) -> Times:
        return Times(*(int(column.min()) for column in self.times))


@dataclass(frozen=True)
class Search:
    """The space that is searched: plans in `arrangements` of the roles, within `budget` bytes of a rank, that it `accepts`."""

    offers: Offers
    arrangements: Sequence[Homes]
    mode: Mode
    budget: int
    accepts: Callable[[Plan], bool] = always
    _stacks: dict[tuple[str, int], Stack] = field(default_factory=dict)

    def rule(self, homes: Homes) -> StepRule:
        return StepRule(self.offers.roles, homes, self.mode)

    def stacks(self, homes: Homes) -> list[Stack] | None:
        """By role; None where a role has no option over its ranks."""
        found = [self._stack(role, home.size) for role, home in zip(self.offers.roles, homes, strict=True)]
        return found if all(stack.options for stack in found) else None

    @property
    def opened(self) -> Mapping[tuple[str, int], Stack]:
        """The options that were looked at, by role and number of ranks."""
        return self._stacks

    def _stack(self, role: str, size: int) -> Stack:
        key = (role, size)
        if key not in self._stacks:
            self._stacks[key] = Stack(self.offers.front(role, size))
        return self._stacks[key]


@dataclass
class Found:
    """The best plans, fastest first, one for each of the actor's homes and layouts.

    `bound_ns`: no plan is faster; `rest_ns`: none that is left out, of another home or layout of the actor's, is faster (None:
    none is left out, by these prices); `looked_at`: layouts tried; `ended`: whether the search came to its end.
    """

    plans: list[Plan] = field(default_factory=list)
    bound_ns: int = 0
    rest_ns: int | None = None
    looked_at: int = 0
    ended: bool = True

    @property
    def gap(self) -> float:
        """By what share the best plan may be slower than the best that there is."""
        return self.plans[0].step_ns / self.bound_ns - 1 if self.plans and self.bound_ns else 0.0


def joined(founds: Sequence[Found]) -> Found:
    """What several searches of parts of a space have found of all of it."""
    plans = sorted((plan for found in founds for plan in found.plans), key=lambda plan: plan.step_ns)
    bounds = [found.bound_ns for found in founds if found.bound_ns]
    rests = [found.rest_ns for found in founds if found.rest_ns is not None]
    looked_at, ended = sum(found.looked_at for found in founds), all(found.ended for found in founds)
    return Found(plans, min(bounds, default=0), min(rests, default=None), looked_at, ended)


class _Place(NamedTuple):
    """Homes by number, with a bound; `refined`: from layouts that fit a rank."""

    bound_ns: int
    refined: bool
    number: int


def search_exact(
    search: Search,
    keep: int,
    out_of_time: Clock = never,
    give_up: Clock = never,
    *,
    first_only: bool = False,
    known: Sequence[Plan] = (),
) -> Found:
    """The `keep` best plans.  Where time runs out, `bound_ns` is the least bound of what was not looked at.

    While there is no plan, `give_up` ends the search in place of `out_of_time`.  `first_only`: any plan will do.  Those `known`
    before, by other prices, are not given back; what is found is faster than `keep` of them, or beside fewer.
    """
    heap, best, found = list(_bounds(search)), Best(keep, known), Found()
    heapq.heapify(heap)
    while heap:
        place = heapq.heappop(heap)
        if place.bound_ns >= best.limit_ns or (first_only and best.plans):
            break
        if (out_of_time if best.plans else give_up)():
            found.ended = False
            found.bound_ns = min([place.bound_ns, *(plan.step_ns for plan in best.plans[:1])])
            found.rest_ns = place.bound_ns
            break
        homes = search.arrangements[place.number]
        stacks = search.stacks(homes)
        if stacks is None:
            continue
        if not place.refined:
            bound_ns = int(search.rule(homes).step_ns([stack.least for stack in stacks]))
            heapq.heappush(heap, _Place(bound_ns, True, place.number))
            continue
        _Descent(search, homes, stacks, best, found).run()
    found.plans = [plan for plan in best.plans if not any(plan is each for each in known)]
    if found.ended and best.plans:
        found.bound_ns = best.plans[0].step_ns
        found.rest_ns = best.plans[-1].step_ns if len(best.plans) >= keep else None
    return found


def _bounds(search: Search) -> Iterator[_Place]:
    for number, bound_ns in least_bounds(search):
        yield _Place(bound_ns, False, number)


def least_bounds(search: Search) -> Iterator[tuple[int, int]]:
    """By the number of an arrangement, what no plan in these homes is faster than; without those in which a role has no option.

    Homes that meet alike are reckoned together.
    """
    if not search.arrangements:
        return
    homes = np.array([[(home.first, home.size) for home in each] for each in search.arrangements], dtype=np.int64)
    least = [_least_by_size(search, role, homes[:, number, 1]) for number, role in enumerate(search.offers.roles)]
    known = np.logical_and.reduce([has for _, has in least])
    for numbers in _alike(homes):
        numbers = numbers[known[numbers]]
        if len(numbers):
            times = [Times(*(column[numbers] for column in columns)) for columns, _ in least]
            bounds = np.broadcast_to(search.rule(search.arrangements[numbers[0]]).step_ns(times), len(numbers))
            yield from zip(numbers.tolist(), bounds.tolist(), strict=True)


def _least_by_size(search: Search, role: str, sizes: Bytes) -> tuple[Times, Any]:
    """Of the role in each arrangement the least times, and whether there are some."""
    distinct, place = np.unique(sizes, return_inverse=True)
    found = [search.offers.least(role, int(size)) for size in distinct]
    table = np.array([each or Times(0) for each in found], dtype=np.int64)[place]
    return Times(*table.T), np.array([each is not None for each in found])[place]


def _alike(homes: Bytes) -> Iterator[Bytes]:
    """Numbers of the arrangements [number, role, (first, size)] in which the same homes hold each other, and so meet."""
    first, end = homes[:, :, 0], homes.sum(axis=2)
    holds = (first[:, :, None] <= first[:, None, :]) & (end[:, None, :] <= end[:, :, None])
    patterns = holds.reshape(len(homes), -1)
    keys = np.packbits(patterns, axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(group.reshape(-1), kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(group.reshape(-1)[order])) + 1)


class Best:
    """The best plans so far, one for each `Plan.key`."""

    def __init__(self, keep: int, known: Sequence[Plan] = ()):
        self.keep = keep
        self.plans = sorted(known, key=lambda each: each.step_ns)[:keep]
        self.by_key: dict[object, int] = {each.key: each.step_ns for each in self.plans}

    @property
    def limit_ns(self) -> float:
        """A plan must be faster than this to be kept."""
        return self.plans[-1].step_ns if len(self.plans) >= self.keep else float("inf")

    def limit_of(self, key: object) -> float:
        return min(self.limit_ns, self.by_key.get(key, self.limit_ns))

    def add(self, plan: Plan) -> None:
        others = [each for each in self.plans if each.key != plan.key]
        self.plans = sorted([*others, plan], key=lambda each: each.step_ns)[: self.keep]
        self.by_key = {each.key: each.step_ns for each in self.plans}


class _Descent:
    """Depth first through the options of the roles in given homes, the actor's first."""

    def __init__(self, search: Search, homes: Homes, stacks: Sequence[Stack], best: Best, found: Found):
        self.search, self.homes, self.stacks, self.best, self.found = search, homes, stacks, best, found
        self.rule = search.rule(homes)
        self.order = _order(search.offers.roles)
        self.segments = _segments(homes, [stack.pieces for stack in stacks])
        self.inside = [(self.segments >= home.first) & (self.segments < home.end) for home in homes]
        self.piece = [
            (self.segments[inside] - home.first) * stack.pieces // home.size
            for inside, home, stack in zip(self.inside, homes, stacks, strict=True)
        ]
        self.open_bytes = self._open_bytes()

    def run(self) -> None:
        held = np.zeros((3, len(self.segments)), dtype=np.int64)
        self._choose(0, [stack.least for stack in self.stacks], {}, held, None)

    def _choose(self, depth: int, times: list[Times], chosen: dict[int, Option], held: Bytes, key: Any) -> None:
        """`held`: bytes of the roles chosen so far, [kind, segment]."""
        role = self.order[depth]
        stack, last = self.stacks[role], depth + 1 == len(self.order)
        bounds = self.rule.step_ns([*times[:role], stack.times, *times[role + 1 :]])
        bounds = np.broadcast_to(bounds, len(stack.options))
        rows = np.flatnonzero(bounds < self.best.limit_of(key))
        self.found.looked_at += len(rows)
        rows = rows[np.argsort(bounds[rows], kind="stable")]
        for row, now in self._fitting(role, rows, held, self.open_bytes[depth + 1]):
            option, bound_ns = stack.options[row], int(bounds[row])
            own = key_of(self.homes, option) if role == 0 else key
            if bound_ns >= self.best.limit_of(own):
                continue
            chosen[role] = option
            if last:
                plan = self._plan(chosen, bound_ns, now)
                if not self.search.accepts(plan):
                    continue
                self.best.add(plan)
                return
            self._choose(depth + 1, [*times[:role], option.times, *times[role + 1 :]], chosen, now, own)

    def _fitting(self, role: int, rows: Any, held: Bytes, still: Bytes) -> Iterator[tuple[int, Bytes]]:
        """Of the options at `rows` those that leave room for what is `still` open, with what is held then."""
        inside, budget = self.inside[role], self.search.budget
        outside = (held.sum(axis=0) + still)[~inside]
        if outside.size and outside.max() > budget:
            return
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            own = self.stacks[role].kinds[some][:, :, self.piece[role]]
            lasting = held[0, inside] + own[:, 0]
            passing = np.maximum(held[1:, inside], own[:, 1:])
            fits = (lasting + passing.sum(axis=1) + still[inside]).max(axis=1) <= budget
            for place in np.flatnonzero(fits).tolist():
                now = held.copy()
                now[0, inside], now[1:, inside] = lasting[place], passing[place]
                yield int(some[place]), now

    def _plan(self, chosen: dict[int, Option], step_ns: int, held: Bytes) -> Plan:
        options = tuple(chosen[role] for role in range(len(self.homes)))
        return Plan(self.homes, options, step_ns, int(held.sum(axis=0).max()))

    def _open_bytes(self) -> list[Bytes]:
        """By depth, what the roles that are still to be chosen last hold of each rank at the least."""
        needed = [np.zeros(len(self.segments), dtype=np.int64)]
        for role in reversed(self.order):
            more = needed[0].copy()
            more[self.inside[role]] += self.stacks[role].kinds[:, 0].min(axis=0)[self.piece[role]]
            needed.insert(0, more)
        return needed


ROWS_AT_ONCE = 64


def _segments(homes: Homes, pieces: Sequence[int]) -> Bytes:
    """The first rank of each run of ranks that no option tells apart."""
    edges = {
        home.first + piece * home.size // count
        for home, count in zip(homes, pieces, strict=True)
        for piece in range(count)
    } | {home.end for home in homes}
    return np.array(sorted(edges - {max(home.end for home in homes)}), dtype=np.int64)


def _order(roles: Sequence[str]) -> list[int]:
    """The actor, then other trained roles, then the rest."""
    return sorted(range(len(roles)), key=lambda role: (role != 0, roles[role] != "critic", role))


def held_bytes(homes: Homes, options: Iterable[Option]) -> Bytes:
    """What the roles of each rank hold, [kind, rank]."""
    held = np.zeros((3, max(home.end for home in homes)), dtype=np.int64)
    for home, option in zip(homes, options, strict=True):
        own, ranks = option.profile.over(home.size), slice(home.first, home.end)
        held[0, ranks] += own[0]
        held[1:, ranks] = np.maximum(held[1:, ranks], own[1:])
    return held
