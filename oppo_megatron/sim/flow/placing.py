"""Search ranks and layouts of a dataflow's calls for the shortest step.

A step is played by Algorithm 1 of ReaL (MLSys 2025): the next call is the one that is ready first (its inputs are made; ties: in
the order of the list), and it starts once its ranks are free. After its update, a model's weights move to each of its other
placements, which keeps the ranks of both busy; the step ends with the last call or move. A depth-first search places call after
call, and leaves out steps that a lower bound shows not to be shorter than the best so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from graphlib import TopologicalSorter
from itertools import combinations
from math import inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from oppo_megatron.sim.flow.dataflow import MOVE
from oppo_megatron.sim.flow.prices import Choice, FlowPrices
from oppo_megatron.sim.laws import Floats, Ints
from oppo_megatron.sim.search.blocks import Block

MOST_FREE = 3
"""Calls that are placed again at a time."""
TOLERANCE = 0.01
"""Steps that are shorter by less than this share are not searched for."""


class Event(NamedTuple):
    """A call, or a move of a model's weights (`choice` None), in nanoseconds from the step's start."""

    name: str
    ranks: Ints
    start_ns: int
    end_ns: int
    choice: Choice | None = None


Job = tuple[int, int, str, Iterable[tuple[Ints, Iterable[tuple[int, Choice | None]]]]]
"""Nanoseconds from which it may start, place in the list, name; by ranks, what it takes in each layout, ascending."""


@dataclass(frozen=True)
class FlowPlan:
    """`events` by start; `bound_ns`: no placement has a shorter step; `fullest_bytes`: of the fullest rank."""

    events: tuple[Event, ...]
    step_ns: int
    fullest_bytes: float
    bound_ns: float = 0


def placed_in(events: tuple[Event, ...]) -> dict[str, Choice]:
    return {event.name: event.choice for event in events if event.choice is not None}


Options = Mapping[str, Mapping[Block, Sequence[Choice]]]
"""Layouts of each call on each block, fastest first."""


class FlowSearch:
    """`tolerance`: steps shorter by less are not searched for; `is_over`: True at the end of the time; `tell`: of progress."""

    def __init__(
        self, prices: FlowPrices, tolerance: float = TOLERANCE,
        is_over: Callable[[], bool] = lambda: False, tell: Callable[[str], None] = lambda text: None,
    ):  # fmt: skip
        self.prices, self.tolerance, self.is_over, self.tell = prices, tolerance, is_over, tell
        by_name, self.parents = {call.name: call for call in prices.flow.calls}, prices.flow.parents
        self.calls = [by_name[name] for name in TopologicalSorter(self.parents).static_order()]
        self.ranks = {block: np.arange(block.first, block.end) for block in prices.blocks()}
        self.num_ranks, self.bound_ns, self.move_ns = prices.cluster.num_ranks, 0.0, cache(prices.move_ns)
        self.best: FlowPlan | None = None

    def find(self) -> FlowPlan | None:
        """Return the best plan found, None if there is none: a first one is improved a few calls at a time, then all."""
        every, count = {call.name: self.prices.choices(call) for call in self.calls}, 1
        if not all(any(own.values()) for own in every.values()):
            return None
        smallest = {
            name: {block: [min(found, key=lambda each: each.held.sum(axis=0).max())] for block, found in own.items() if found}
            for name, own in every.items()
        }
        self._search(smallest, first=True)
        while (best := self.best) is not None and count <= MOST_FREE and not self.is_over():
            for free in combinations(self.parents, min(count, len(self.calls))):
                placed = placed_in((self.best or best).events)
                self._search(every | {name: {each.block: [each]} for name, each in placed.items() if name not in free})
            count = 1 if self.best is not best else count + 1
        self.bound_ns = self._limit if self._search(every, whole=True) else self.bound_ns
        return self.best and replace(self.best, bound_ns=min(self.best.step_ns, self.bound_ns))

    @property
    def _limit(self) -> float:
        return inf if self.best is None else self.best.step_ns * (1 - self.tolerance)

    def _search(self, options: Options, *, first: bool = False, whole: bool = False) -> bool:
        self.options, self.least = options, dict[str, tuple[float, float]]()
        for name, own in options.items():
            times = [(each.time_ns, each.time_ns * block.size) for block, found in own.items() for each in found]
            self.least[name] = min(ns for ns, _ in times), min(work for _, work in times)
        return self._visit((), first=first, whole=whole)

    def _visit(self, events: tuple[Event, ...], *, first: bool = False, whole: bool = False) -> bool:
        """Search the steps that begin with `events`; return False at the end of the time, or after the `first` plan."""
        ends, placed = {event.name: event.end_ns for event in events}, placed_in(events)
        clocks, found = np.zeros(self.num_ranks), list[tuple[float, Event]]()
        for event in events:
            clocks[event.ranks] = event.end_ns
        ready_ns, _, name, places = min(self._ready(ends, placed), default=(0, 0, None, ()))
        if name is None:
            self.best = FlowPlan(events, int(clocks.max()), self._held(placed).max())
            self.tell(f"searching; the best step so far takes {clocks.max() / 1e9:.3g} s")
            return not first
        for ranks, times in places:
            start_ns, after = max(ready_ns, int(clocks[ranks].max())), clocks.copy()
            for time_ns, choice in times:
                after[ranks] = start_ns + time_ns
                bound_ns = self._lower_bound({**ends, name: start_ns + time_ns}, after, ready_ns)
                if bound_ns >= self._limit:
                    break  # the next ones are slower
                found.append((bound_ns, Event(name, ranks, start_ns, start_ns + time_ns, choice)))
        for bound_ns, event in sorted(found, key=itemgetter(0)):
            if whole:  # those before it have been searched, and no later one has a lower bound
                self.bound_ns = max(self.bound_ns, bound_ns)
            if bound_ns >= self._limit:
                return True
            fits = event.choice is None or self._held(placed | {name: event.choice}).max() <= self.prices.budget
            if self.is_over() or (fits and not self._visit((*events, event), first=first)):
                return False
        return True

    def _ready(self, ends: Mapping[str, int], placed: Mapping[str, Choice]) -> Iterator[Job]:
        """Yield calls whose inputs have been made, and moves of trained weights, one to each other placement of the model."""
        for number, call in enumerate(calls := self.prices.flow.calls):
            parents = self.parents[call.name]
            if call.name not in ends and all(parent in ends for parent in parents):
                times = (((each.time_ns, each) for each in found) for found in self.options[call.name].values())
                places = zip((self.ranks[block] for block in self.options[call.name]), times, strict=True)
                yield max((ends[parent] for parent in parents), default=0), number, call.name, places
            elif call.name in ends and call.kind == "train":
                source, users = placed[call.name], self.prices.flow.calls_of(call.model)
                targets = {placed[user.name].where: user.name for user in reversed(users)}
                for place, user in enumerate(targets.values(), start=len(calls)):
                    if placed[user].where != source.where and (name := MOVE + user) not in ends:
                        ranks = np.union1d(self.ranks[source.block], self.ranks[placed[user].block])
                        time_ns = self.move_ns(call.model, source, placed[user])
                        yield ends[call.name], place, name, [(ranks, [(time_ns, None)])]

    def _lower_bound(self, ends: dict[str, float], clocks: Floats, ready_ns: int) -> float:
        """Nanoseconds that no such step undercuts: by what waits for what, and by the work of all ranks.  Changes `ends`."""
        first, longest, work = inf, clocks.max(), 0.0
        for call in self.calls:
            if call.name not in ends:
                least_ns, least_work = self.least[call.name]
                start_ns = max([ready_ns, *(ends[parent] for parent in self.parents[call.name])])
                ends[call.name] = start_ns + least_ns
                first, longest, work = min(first, start_ns), max(longest, start_ns + least_ns), work + least_work
        return float(longest if first == inf else max(longest, (work + np.maximum(clocks, first).sum()) / len(clocks)))

    def _held(self, placed: Mapping[str, Choice]) -> Floats:
        """Bytes by rank: a model's calls with one layout on the same ranks share its weights; calls compute in turn."""
        lasting, passing, known = np.zeros(self.num_ranks), np.zeros((2, self.num_ranks)), set[object]()
        for call in self.calls:
            if (own := placed.get(call.name)) is not None:
                shared = (call.model, own.where) in known
                known.add((call.model, own.where))
                lasting, passing = lasting + own.held[shared:2].sum(axis=0), np.maximum(passing, own.held[2:])
        return np.asarray(lasting + passing.sum(axis=0))
