"""Markov chain Monte Carlo over plans, as ReaL searches (MLSys 2025): for spaces too large to enumerate, and beside `exact`.

A state is a plan; a proposal draws one role anew, its layout or also its home.  It is taken if it is not slower, else with
probability exp(-slower / temperature).  A plan that does not fit is infinitely slow.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from math import exp

from oppo_megatron.sim.search.exact import Best, Clock, Found, Plan, Search, held_bytes, least_bounds, never
from oppo_megatron.sim.search.homes import Home, Homes
from oppo_megatron.sim.search.options import Option

PROPOSALS = 20_000
TEMPERATURE = 0.02
"""Of the first plan's step."""


def search_mcmc(search: Search, keep: int, seed: int, out_of_time: Clock = never, proposals: int = PROPOSALS) -> Found:
    """The best plans that a chain of so many proposals meets.  It proves nothing: `bound_ns` is the least bound of all homes."""
    chain = _Chain(search, random.Random(seed))  # noqa: S311  (to be drawn again, not to be secret)
    best, found = Best(keep), Found()
    found.bound_ns = min((bound_ns for _, bound_ns in least_bounds(search)), default=0)
    now = chain.first()
    if now is None:
        return found
    best.add(now)
    temperature = TEMPERATURE * now.step_ns
    for _ in range(proposals):
        if out_of_time():
            found.ended = False
            break
        found.looked_at += 1
        other = chain.proposal(now)
        if other is None:
            continue
        if other.step_ns < best.limit_of(other.key):
            best.add(other)
        slower = other.step_ns - now.step_ns
        if slower <= 0 or chain.rng.random() < exp(-slower / temperature):
            now = other
    found.plans = best.plans
    found.bound_ns = found.rest_ns = min([found.bound_ns, *(plan.step_ns for plan in found.plans[:1])])
    return found


class _Chain:
    """Draws plans."""

    def __init__(self, search: Search, rng: random.Random):
        self.search, self.rng = search, rng
        self.beside: dict[tuple[int, tuple[tuple[int, ...], ...]], list[Homes]] = defaultdict(list)
        for homes in search.arrangements:
            for role in range(len(homes)):
                self.beside[role, _pattern(homes, role)].append(homes)

    def first(self) -> Plan | None:
        """The fastest options in the homes of least bound, or, where they do not fit, the smallest."""
        for _, number in sorted((bound_ns, number) for number, bound_ns in least_bounds(self.search)):
            homes = self.search.arrangements[number]
            stacks = self.search.stacks(homes)
            if stacks is None:
                continue
            fastest = tuple(stack.options[0] for stack in stacks)
            smallest = tuple(min(stack.options, key=lambda o: (o.profile.fullest, o.number)) for stack in stacks)
            for options in (fastest, smallest):
                if plan := self._plan(homes, options):
                    return plan
        return None

    def proposal(self, plan: Plan) -> Plan | None:
        role = self.rng.randrange(len(plan.homes))
        homes = plan.homes
        if self.rng.random() < 0.5:
            homes = self.rng.choice(self.beside[role, _pattern(homes, role)])
        stacks = self.search.stacks(homes)
        if stacks is None:
            return None
        options = [*plan.options]
        options[role] = self.rng.choice(stacks[role].options)
        return self._plan(homes, options)

    def _plan(self, homes: Homes, options: Sequence[Option]) -> Plan | None:
        """None where it does not fit."""
        fullest = int(held_bytes(homes, options).sum(axis=0).max())
        if fullest > self.search.budget:
            return None
        step_ns = int(self.search.rule(homes).step_ns([option.times for option in options]))
        plan = Plan(homes, tuple(options), step_ns, fullest)
        return plan if self.search.accepts(plan) else None


def _pattern(homes: Homes, role: int) -> tuple[tuple[int, ...], ...]:
    """How the other roles live: their sizes, and which of them meet."""
    others = [home for number, home in enumerate(homes) if number != role]
    return tuple((home.size, *(_meeting(home, other) for other in others)) for home in others)


def _meeting(one: Home, other: Home) -> int:
    return int(one.meets(other))
