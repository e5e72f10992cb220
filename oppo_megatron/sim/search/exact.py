"""Branch and bound over homes and layouts: the plans of least seconds, and proof that none is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from oppo_megatron.sim.search.homes import Homes
from oppo_megatron.sim.search.options import Bytes, Option
from oppo_megatron.sim.search.step import Mode, StepRule, Times


class Offers(Protocol):
    """What the search chooses from."""

    @property
    def roles(self) -> tuple[str, ...]: ...

    def front(self, role: str, size: int) -> list[Option]: ...


@dataclass(frozen=True)
class Plan:
    """Homes and layouts of all roles, with the nanoseconds of a step and the bytes of the fullest rank."""

    homes: Homes
    options: tuple[Option, ...]
    step_ns: int
    fullest_bytes: int


@dataclass(frozen=True)
class Search:
    """What is searched: `arrangements` of the roles on `num_ranks`, within `budget` bytes of a rank."""

    offers: Offers
    arrangements: Sequence[Homes]
    mode: Mode
    budget: int

    def rule(self, homes: Homes) -> StepRule:
        return StepRule(self.offers.roles, homes, self.mode)

    def fronts(self, homes: Homes) -> list[list[Option]]:
        return [self.offers.front(role, home.size) for role, home in zip(self.offers.roles, homes, strict=True)]


@dataclass
class Found:
    """The best plans, fastest first, one for each way to lay out the actor in a place.

    `bound_ns`: no plan is faster; `looked_at`: places and layouts; `ended`: whether the search came to its end.
    """

    plans: list[Plan] = field(default_factory=list)
    bound_ns: int = 0
    looked_at: int = 0
    ended: bool = True


class _Place(NamedTuple):
    bound_ns: int
    number: int


def search_exact(search: Search, keep: int, out_of_time: Callable[[], bool] = lambda: False) -> Found:
    """The `keep` best plans.  Where time runs out, `bound_ns` is the least bound of what was not looked at."""
    places = sorted(_bounds(search))
    best, found = _Best(keep), Found()
    for bound_ns, number in places:
        if bound_ns >= best.limit_ns:
            break
        if out_of_time():
            found.ended = False
            found.bound_ns = min(bound_ns, *(plan.step_ns for plan in best.plans[:1]))
            break
        _Descent(search, search.arrangements[number], best, found).run()
    found.plans = best.plans
    if found.ended and found.plans:
        found.bound_ns = found.plans[0].step_ns
    return found


def _bounds(search: Search) -> Iterator[_Place]:
    for number, homes in enumerate(search.arrangements):
        yield _Place(search.rule(homes).step_ns([_least(front) for front in search.fronts(homes)]), number)


def _least(front: Sequence[Option]) -> Times:
    """The least of each phase."""
    columns = zip(*(option.times for option in front), strict=True)
    return Times(*(min(column) for column in columns))


class _Best:
    """The best plans so far: one for each place and layout of the actor."""

    def __init__(self, keep: int):
        self.keep = keep
        self.plans: list[Plan] = []

    @property
    def limit_ns(self) -> float:
        """A plan must be faster than this to be kept."""
        return self.plans[-1].step_ns if len(self.plans) >= self.keep else float("inf")

    def limit_of(self, key: object) -> float:
        same = [plan.step_ns for plan in self.plans if actor_key(plan) == key]
        return min([self.limit_ns, *same])

    def add(self, plan: Plan) -> None:
        key = actor_key(plan)
        others = [each for each in self.plans if actor_key(each) != key]
        self.plans = sorted([*others, plan], key=lambda each: each.step_ns)[: self.keep]


def actor_key(plan: Plan) -> object:
    """What tells plans apart in the list of the best."""
    actor = plan.options[0]
    return plan.homes, actor.serving, actor.training


class _Descent:
    """Depth first through the options of the roles in given homes, the actor's first."""

    def __init__(self, search: Search, homes: Homes, best: _Best, found: Found):
        self.search, self.homes, self.best, self.found = search, homes, best, found
        self.rule, self.fronts = search.rule(homes), search.fronts(homes)
        self.least = [_least(front) for front in self.fronts]
        self.num_ranks = max(home.end for home in homes)
        self.order = _order(search.offers.roles)
        self.open_bytes = self._open_bytes()

    def run(self) -> None:
        empty = np.zeros((3, self.num_ranks), dtype=np.int64)
        self._choose(0, list(self.least), [None] * len(self.homes), empty, None)

    def _choose(self, depth: int, times: list[Times], chosen: list[Option | None], held: Bytes, key: object) -> None:
        """`held`: bytes of the roles chosen so far, [kind, rank]."""
        if depth == len(self.order):
            plan = Plan(
                self.homes, tuple(each for each in chosen if each is not None), self.rule.step_ns(times),
                int(held.sum(axis=0).max()),
            )  # fmt: skip
            self.best.add(plan)
            return
        role = self.order[depth]
        for bound_ns, option in self._bounded(role, times):
            own = (self.homes, option.serving, option.training) if role == 0 else key
            if bound_ns >= self.best.limit_of(own):
                if role == 0 and bound_ns < self.best.limit_ns:
                    continue
                break
            self.found.looked_at += 1
            now = _with(held, self.homes[role].first, self.homes[role].size, option)
            if (now.sum(axis=0) + self.open_bytes[depth + 1]).max() > self.search.budget:
                continue
            chosen[role] = option
            self._choose(depth + 1, [*times[:role], option.times, *times[role + 1 :]], chosen, now, own)
        chosen[role] = None

    def _bounded(self, role: int, times: list[Times]) -> list[tuple[int, Option]]:
        """The role's options by what a step takes at least with them."""
        bounds = [
            (self.rule.step_ns([*times[:role], option.times, *times[role + 1 :]]), option)
            for option in self.fronts[role]
        ]
        return sorted(bounds, key=lambda each: (each[0], each[1].times.total, each[1].number))

    def _open_bytes(self) -> list[Bytes]:
        """By depth, what the roles that are still to be chosen last hold of each rank at the least."""
        needed = [np.zeros(self.num_ranks, dtype=np.int64)]
        for role in reversed(self.order):
            home, more = self.homes[role], needed[0].copy()
            lasting = [np.repeat(each.profile.kinds[0], home.size // each.profile.pieces) for each in self.fronts[role]]
            more[home.first : home.end] += np.min(lasting, axis=0)
            needed.insert(0, more)
        return needed


def _order(roles: Sequence[str]) -> list[int]:
    """The actor, then other trained roles, then the rest."""
    return sorted(range(len(roles)), key=lambda role: (role != 0, roles[role] != "critic", role))


def _with(held: Bytes, first: int, size: int, option: Option) -> Bytes:
    own, now = option.profile.over(size), held.copy()
    now[0, first : first + size] += own[0]
    np.maximum(now[1:, first : first + size], own[1:], out=now[1:, first : first + size])
    return now


def held_bytes(homes: Homes, options: Iterable[Option]) -> Bytes:
    """What the roles of each rank hold, [kind, rank]."""
    held = np.zeros((3, max(home.end for home in homes)), dtype=np.int64)
    for home, option in zip(homes, options, strict=True):
        held = _with(held, home.first, home.size, option)
    return held
