"""The search of plans against brute force over every concrete placement, with random prices and memories."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.config.model import TrainingLayoutConfig
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.sim.events.dataflow import check, makespan_ns, play
from oppo_megatron.sim.search.calls import step_calls
from oppo_megatron.sim.search.exact import Search, held_bytes, least_bounds, search_exact
from oppo_megatron.sim.search.homes import Home, Homes, arrangements, part_places, set_sizes, totals
from oppo_megatron.sim.search.mcmc import search_mcmc
from oppo_megatron.sim.search.options import Option, Profile, undominated
from oppo_megatron.sim.search.step import Mode, StepRule, Times

ROLES = ("actor", "reference", "critic", "reward")
TRAINED = ("actor", "critic")
MODES = st.sampled_from([Mode(False, False), Mode(True, True, 0.25), Mode(True, False, 0.1)])


@dataclass
class Drawn:
    """Options of random times and memories, a few for each role and number of ranks."""

    seed: int
    roles: tuple[str, ...] = ROLES
    most: int = 3
    budget: int = 100
    all: dict[tuple[str, int], list[Option]] = field(default_factory=dict)

    def options(self, role: str, size: int) -> list[Option]:
        key = (role, size)
        if key not in self.all:
            rng = random.Random(f"{self.seed} {role} {size}")
            self.all[key] = [self._option(rng, role, size, number) for number in range(rng.randint(0, self.most))]
        return self.all[key]

    def _option(self, rng: random.Random, role: str, size: int, number: int) -> Option:
        trained = role in TRAINED
        pp = rng.choice([stages for stages in (1, 2, 4) if size % stages == 0])
        kinds = np.array([[rng.randint(5, 40) for _ in range(pp)] for _ in range(3)], dtype=np.int64)
        times = Times(rng.randint(1, 60), rng.randint(1, 60) if trained else 0, rng.choice([0, 5]) if trained else 0)
        train = TrainingLayoutConfig(tp=1, pp=pp, dp=size // pp) if trained else None
        return Option(number, Sizes(1, pp, size // pp), train, times, Profile(kinds))

    def front(self, role: str, size: int) -> list[Option]:
        return undominated(self.options(role, size), lambda option: option, self.budget)

    def least(self, role: str, size: int) -> Times | None:
        options = self.options(role, size)
        return Times(*map(min, zip(*(o.times for o in options), strict=True))) if options else None


@cache
def places(nodes: int, gpus: int) -> list[Homes]:
    return list(arrangements(dict.fromkeys(ROLES, set_sizes(nodes, gpus)), nodes * gpus, gpus))


def concrete(nodes: int, gpus: int, count: int) -> Iterator[Homes]:
    """Every placement of roles on numbered ranks: equal, apart, or one a part of another that is part of none."""
    sizes, ends = set_sizes(nodes, gpus), set(totals(nodes, gpus))
    sets = [
        Home(first, size)
        for size in sizes
        for first in range(0, nodes * gpus - size + 1)
        if (first % gpus == 0 if size >= gpus else first // gpus == (first + size - 1) // gpus)
    ]
    for homes in product(sets, repeat=count):
        different = set(homes)
        inner = {a for a in different for b in different if a != b and b.holds(a)}
        nested = all(not (a != b and a.meets(b)) or a.holds(b) or b.holds(a) for a in different for b in different)
        flat = all(not (b in inner and b != a and b.holds(a)) for a in different for b in different)
        placed = all(a.first in part_places(b, a.size, gpus) for a in inner for b in different if a != b and b.holds(a))
        held = {rank for home in different for rank in home.ranks}
        if placed and nested and flat and len(held) in ends and held == set(range(len(held))):
            yield homes


def brute_force(offers: Drawn, tried: Sequence[Homes], mode: Mode) -> int | None:
    """The least step of all placements and all options, dominated ones too; ranks counted one by one."""
    best: int | None = None
    for homes in tried:
        rule = StepRule(offers.roles, homes, mode)
        for options in product(
            *(offers.options(role, home.size) for role, home in zip(offers.roles, homes, strict=True))
        ):
            held: dict[int, list[tuple[int, int, int]]] = {}
            for home, option in zip(homes, options, strict=True):
                for place, rank in enumerate(home.ranks):
                    stage = place * option.profile.pieces // home.size
                    held.setdefault(rank, []).append(tuple(option.profile.kinds[:, stage].tolist()))
            fullest = max(
                sum(each[0] for each in own) + max(each[1] for each in own) + max(each[2] for each in own)
                for own in held.values()
            )
            step_ns = rule.step_ns([option.times for option in options])
            if fullest <= offers.budget and (best is None or step_ns < best):
                best = step_ns
    return best


def searched(offers: Drawn, nodes: int, gpus: int, mode: Mode) -> Search:
    admitted = {role: [s for s in set_sizes(nodes, gpus) if offers.least(role, s)] for role in offers.roles}
    tried = [homes for total in totals(nodes, gpus) for homes in arrangements(admitted, total, gpus)]
    return Search(offers, tried, mode, offers.budget)


def held_to_brute_force(offers: Drawn, nodes: int, gpus: int, mode: Mode) -> None:
    admitted = [
        homes
        for homes in concrete(nodes, gpus, len(offers.roles))
        if all(offers.options(role, home.size) for role, home in zip(offers.roles, homes, strict=True))
    ]
    search = searched(offers, nodes, gpus, mode)
    found = search_exact(search, 3)
    best = brute_force(offers, admitted, mode)
    assert (found.plans[0].step_ns if found.plans else None) == best
    if best is None:
        return
    plan = found.plans[0]
    assert found.ended and found.bound_ns == best
    assert int(held_bytes(plan.homes, plan.options).sum(axis=0).max()) == plan.fullest_bytes <= offers.budget
    chain = search_mcmc(search, 3, seed=offers.seed, proposals=300)
    assert all(each.step_ns >= best for each in chain.plans) and chain.bound_ns <= best


@settings(max_examples=40)
@given(st.integers(0, 10**6), MODES, st.sampled_from([(1, 2), (1, 4), (2, 2)]), st.sampled_from([60, 80, 100, 160]))
def test_exact_is_brute_force(seed: int, mode: Mode, cluster: tuple[int, int], budget: int) -> None:
    offers = Drawn(seed, ROLES[:3], most=5 if cluster == (1, 2) else 2, budget=budget)
    held_to_brute_force(offers, *cluster, mode)


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), MODES, st.sampled_from([80, 120, 200]))
def test_exact_is_brute_force_on_two_nodes_of_four(seed: int, mode: Mode, budget: int) -> None:
    held_to_brute_force(Drawn(seed, ROLES[:3], most=2, budget=budget), 2, 4, mode)
    held_to_brute_force(Drawn(seed, ROLES, most=1, budget=budget), 2, 2, mode)


@given(st.integers(0, 10**6), st.sampled_from([(1, 4), (2, 4), (4, 2)]))
def test_the_closed_form_is_what_algorithm_1_plays(seed: int, cluster: tuple[int, int]) -> None:
    """Sequential phases; streamed ones take at least as long as the closed form says."""
    rng = random.Random(seed)
    homes = rng.choice(places(*cluster))
    times = [
        Times(rng.randint(1, 99), *((rng.randint(1, 50), rng.randint(0, 50)) if role in TRAINED else ()))
        for role in ROLES
    ]
    for mode in (Mode(False, False), Mode(True, False, 0.0)):
        rule = StepRule(ROLES, homes, mode)
        calls = step_calls(rule, times)
        spans = play(calls)
        check(calls, spans)
        parts = rule.parts(times)
        assert parts.total == rule.step_ns(times) and min(parts) >= 0
        if mode.streams:
            assert rule.step_ns(times) <= makespan_ns(spans)
        else:
            assert rule.step_ns(times) == makespan_ns(spans)


def test_each_way_to_place_roles_comes_once() -> None:
    """Of concrete placements, those that a renumbering of nodes and ranks makes equal are one."""

    def pattern(homes: Homes) -> tuple[object, ...]:
        return tuple(
            (a.size, tuple((a.meets(b), a.first - b.first if a.meets(b) else None) for b in homes)) for a in homes
        )

    for nodes, gpus in ((1, 4), (2, 2), (2, 4)):
        sizes = dict.fromkeys(ROLES[:3], set_sizes(nodes, gpus))
        found = [pattern(homes) for total in totals(nodes, gpus) for homes in arrangements(sizes, total, gpus)]
        assert len(found) == len(set(found))
        assert set(found) == {pattern(homes) for homes in concrete(nodes, gpus, 3)}


def test_a_search_that_ends_early_says_how_far_it_is() -> None:
    gaps = []
    for seed in range(6):
        search = searched(Drawn(seed, budget=120), 2, 2, Mode(False, False))
        whole = search_exact(search, 1)
        cut = search_exact(search, 3, lambda: True)  # as soon as there is a plan
        nothing = search_exact(search, 3, give_up=lambda: True)
        if not whole.plans:
            continue
        assert not cut.ended and cut.bound_ns <= whole.plans[0].step_ns <= cut.plans[0].step_ns
        assert cut.gap == cut.plans[0].step_ns / cut.bound_ns - 1
        assert not nothing.plans and 0 < nothing.bound_ns <= whole.plans[0].step_ns
        gaps.append(cut.gap)
    assert min(gaps) >= 0 and max(gaps) > 0


def test_equal_input_gives_equal_plans() -> None:
    searches = [searched(Drawn(7, budget=150), 2, 4, Mode(True, True, 0.2)) for _ in range(2)]
    exact = [[(p.homes, [o.number for o in p.options]) for p in search_exact(s, 5).plans] for s in searches]
    chains = [
        [(p.homes, [o.number for o in p.options]) for p in search_mcmc(s, 5, 3, proposals=500).plans] for s in searches
    ]
    assert exact[0] == exact[1] and chains[0] == chains[1] and exact[0]


@settings(max_examples=15)
@given(st.integers(0, 10**6), MODES)
def test_bounds_of_all_homes_are_those_of_each(seed: int, mode: Mode) -> None:
    """Without those in which a role has no option."""

    @cache
    def least(role: str, size: int) -> Times | None:
        rng = random.Random(f"{seed} {role} {size}")
        long = rng.choice([3, 300])
        return None if rng.random() < 0.05 else Times(rng.randint(1, long), rng.randint(0, long) if role in TRAINED else 0)

    drawn, sizes = Drawn(seed), set_sizes(1, 4)
    drawn.least = least  # type: ignore[method-assign]
    homes = [each for total in totals(1, 4) for each in arrangements(dict.fromkeys(ROLES, sizes), total, 4)]
    alone = {}
    for number, each in enumerate(homes):
        times = [least(role, home.size) for role, home in zip(ROLES, each, strict=True)]
        if None not in times:
            alone[number] = StepRule(ROLES, each, mode).step_ns([known for known in times if known is not None])
    assert dict(least_bounds(Search(drawn, homes, mode, drawn.budget))) == alone
