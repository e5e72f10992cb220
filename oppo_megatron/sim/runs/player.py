"""Play rounds in virtual time: each component in the generator's order, then the chunk's delivery. U units of ranks.

A unit of work (`schedule/weaving/components.py`) begins when its ranks are free and its input has arrived. Inputs follow a
*thread*: a micro-batch's way from stage to stage and, in decoding, from the last stage back to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from oppo_megatron.columns import Bools, Ints
from oppo_megatron.errors import ScheduleError
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.trace import Span
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.rounds import Batch, Growths, Round, Site, sums
from oppo_megatron.schedule.weaving.components import Team, Timetable, component_of, count_of
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.generators import generator_of
from oppo_megatron.sim.runs.loop import Recorded

Floats = npt.NDArray[np.float64]

KEPT_UNITS = 1 << 18
"""Most units in a component's kept orders."""

NOTHING, NOBODY = 0, 1
"""Threads of units without input, and of units without successors."""
VOID, AWAITED = -2.0, -1.0
"""In place of seconds: a skipped decode micro-step, and the first one, for which tokens are still received."""


class Counts(NamedTuple):
    """Tokens of each sequence in a round; `seq_ids` ascend."""

    seq_ids: Ints
    tokens: Ints

    @classmethod
    def of(cls, seq_ids: Ints, tokens: Ints) -> Counts:
        order = np.argsort(seq_ids)
        return cls(seq_ids[order], tokens[order])

    def running(self, batch: Batch, steps: int) -> Ints:
        """Running sequences of a micro-batch, [steps]."""
        tokens = self.tokens[np.searchsorted(self.seq_ids, Growths.of(batch).seq_ids)]
        ended = np.bincount(np.minimum(tokens, steps), minlength=steps + 1)
        found: Ints = len(tokens) - np.cumsum(ended[:steps])
        return found


class _Order(NamedTuple):
    """All stages' units. `table` [4, n]: indices of durations and stages, threads waited for and passed on."""

    table: npt.NDArray[np.int32]
    threads: int


class Component:
    """Orders are kept by a round's shape."""

    def __init__(self, site: Site, rank: int, generator: str, costs: Costs):
        self._component = component_of(site, rank)
        self.site, self.generator, self.costs = self._component.model, generator, costs
        self.all_ranks: frozenset[int] = self._component.ranks
        placements = self.site.placements
        self._teams: list[Team] = [(role, d) for role in self._component.replicas for d in range(placements[role].dp)]
        self._stages = [(team, stage) for team in self._teams for stage in range(placements[team[0]].pp)]
        numbers = {each: number for number, each in enumerate(self.site.ranks)}
        self._ranks = [
            tuple(numbers[each] for each in placements[role].stage_ranks(d, stage)) for (role, d), stage in self._stages
        ]
        self._own = sorted({rank for ranks in self._ranks for rank in ranks})
        self._orders: dict[tuple[tuple[int, int, int], ...], _Order] = {}

    def play(self, round_: Round, counts: Counts, begun: Mapping[int, float]) -> Iterator[tuple[int, float, float]]:
        """Yield rank, end, scoring seconds of ranks with work."""
        ranks = self.site.ranks
        if len(self._own) == 1:
            seconds, scoring_s = self._on_one_rank(round_, counts)
            if seconds:
                rank = ranks[self._own[0]]
                yield rank, begun[rank] + seconds, scoring_s
            return
        shape = replace(self._component.part(round_), index=1)
        table, free = list(self._durations(shape, counts)), [begun[rank] for rank in ranks]
        order = self._order(shape)
        in_order, ready = np.concatenate([own for own, _ in table])[order.table[0]], [-np.inf] * order.threads
        live = in_order > VOID
        units = (*order.table[1:, live].tolist(), in_order[live].tolist())
        _pass(units, self._ranks, free, ready, self.costs.message_s)
        self._receive(shape, free, ready)
        scored, worked = [0.0] * len(free), set[int]()
        for own_ranks, (own, scores) in zip(self._ranks, table, strict=True):
            worked |= set(own_ranks) if len(own) else set()
            for rank in own_ranks if scores else ():
                scored[rank] += float(own.sum())
        yield from ((ranks[number], free[number], scored[number]) for number in sorted(worked))

    def _on_one_rank(self, round_: Round, counts: Counts) -> tuple[float, float]:
        """Seconds of a rank that waits for nothing."""
        seconds, scoring_s, costs = 0.0, 0.0, self.costs
        for role, replicas in self._component.replicas.items():
            prefill, line = round_.prefill.get(role, ()), costs.prefill_at(role, 0)
            for d in (each for each in replicas if each < len(prefill)):
                number, (tokens, rows) = len(prefill[d]), sums(prefill[d]).sum(axis=1).tolist()
                own = number * line.fixed_s + tokens * line.per_token_s
                if role != "actor":
                    own += number * costs.score.fixed_s + rows * costs.score.per_token_s
                    scoring_s += own
                seconds += own
        decode, sample = costs.decode_at(0), costs.sample
        for d in self._component.replicas.get("actor", ()):
            for batch in round_.decode[d] if d < len(round_.decode) else ():
                running = counts.running(batch, round_.steps)
                steps, tokens = int((running > 0).sum()), int(running.sum())
                seconds += steps * (decode.fixed_s + sample.fixed_s) + tokens * (decode.per_token_s + sample.per_token_s)
        return seconds, scoring_s

    def _receive(self, shape: Round, free: list[float], ready: Sequence[float]) -> None:
        first = NOBODY + 1
        for team in self._teams:
            count = count_of(team, shape)
            arrived = max(ready[first + count.prefills : first + count.prefills + count.batches], default=-np.inf)
            first += count.prefills + count.batches
            for (own, stage), ranks in zip(self._stages, self._ranks, strict=True):
                if own == team and stage < self.site.placements[team[0]].pp - 1:
                    for rank in ranks:
                        free[rank] = max(free[rank], arrived)

    def _order(self, shape: Round) -> _Order:
        counts = [count_of(team, shape) for team in self._teams]
        key = tuple((count.prefills, count.batches, count.steps) for count in counts)
        if key not in self._orders:
            if sum(each.table.shape[1] for each in self._orders.values()) > KEPT_UNITS:
                self._orders.clear()
            self._orders[key] = self._planned(shape)
        return self._orders[key]

    def _planned(self, shape: Round) -> _Order:
        timetable = generator_of(self.generator)(shape, self.site, self.costs).actions
        if not isinstance(timetable, Timetable):
            why = "gives an order without times, which simulated stages need"
            raise ScheduleError(f"overlap.schedule {self.generator} {why}; add overlap.schedule=auto here, and run with yours")
        starts, placed, takes, gives, first = [], [], [], [], NOBODY + 1
        for team in self._teams:
            count, pp = count_of(team, shape), self.site.placements[team[0]].pp
            threads = first + np.concatenate(
                [np.arange(count.prefills), count.prefills + np.tile(np.arange(count.batches), count.steps)]
            ).astype(np.int64)
            prefills = np.arange(len(threads)) < count.prefills
            none = np.zeros((pp, 0), dtype=np.int64)
            times = timetable.times.get(team, (none, none))
            for stage in range(pp):
                starts.append(times[0][stage])
                placed.append(times[1][stage])
                alone = np.full(len(threads), pp == 1)
                takes.append(np.where(alone | (prefills & (stage == 0)), NOTHING, threads))
                gives.append(np.where(alone | (prefills & (stage == pp - 1)), NOBODY, threads))
            first += count.prefills + count.batches
        stages = np.repeat(np.arange(len(starts)), list(map(len, starts)))
        order = np.lexsort((np.concatenate(placed), np.concatenate(starts)))
        table = np.stack([order, stages[order], np.concatenate(takes)[order], np.concatenate(gives)[order]])
        return _Order(table.astype(np.int32), first)

    def _durations(self, shape: Round, counts: Counts) -> Iterator[tuple[Floats, bool]]:
        """Yield per stage its units' seconds, and whether they score."""
        for role, d in self._teams:
            pp, count = self.site.placements[role].pp, count_of((role, d), shape)
            tokens, rows = sums(shape.prefill[role][d] if count.prefills else ())
            running = [counts.running(batch, count.steps) for batch in shape.decode[d]] if count.steps else []
            for stage in range(pp):
                line, score = self.costs.prefill_at(role, stage), self.costs.score
                own = line.fixed_s + tokens * line.per_token_s
                if role != "actor" and stage == pp - 1:
                    own = own + score.fixed_s + rows * score.per_token_s
                if running:
                    own = np.concatenate([own, self._decode_s(stage, pp, np.stack(running, axis=1)).ravel()])
                yield own, role != "actor"

    def _decode_s(self, stage: int, pp: int, running: Ints) -> Floats:
        """Seconds, [steps, micro-batches]."""
        line, sample, last = self.costs.decode_at(stage), self.costs.sample, stage == pp - 1
        seconds = line.fixed_s + running * line.per_token_s
        if last:
            seconds = seconds + sample.fixed_s + running * sample.per_token_s
        void = np.full_like(seconds, VOID)
        if not last:
            void[1:][running[:-1] > 0] = AWAITED
        found: Floats = np.where(running > 0, seconds, void)
        return found


def _pass(
    units: tuple[list[Any], ...], ranks: Sequence[tuple[int, ...]], free: list[float], ready: list[float], message_s: float
) -> None:
    """Play `units` (stage, thread waited for, thread passed on, seconds); advance the clocks of ranks and threads."""
    single = [own[0] for own in ranks]
    shared = any(len(own) > 1 for own in ranks)
    for stage, takes, gives, seconds in zip(*units, strict=True):
        rank = single[stage]
        start = free[rank]
        if shared:
            for other in ranks[stage]:
                start = max(start, free[other])
        if ready[takes] > start:
            start = ready[takes]
        if seconds >= 0:
            start += seconds
            ready[gives] = start + message_s
        free[rank] = start
        if shared:
            for other in ranks[stage]:
                free[other] = start


def components_of(site: Site, generator: str, costs: Costs) -> Iterator[Component]:
    seen: set[int] = set()
    for rank in site.ranks:
        if rank not in seen:
            found = Component(site, rank, generator, costs)
            seen |= found.all_ranks
            yield found


@dataclass(frozen=True)
class Units:
    """Sets of ranks with the same stages of the same replicas.

    `roles`: units with a part of each role, [U]. `hops` [U]: messages that bring a chunk. `fed` [2, n]: receiving and sending
    units, by hops. Units of equal `kinds` [U] differ in hops alone. `source`: the actor's output; `scorer`: first scorer.
    """

    roles: Mapping[str, Bools]
    hops: Ints
    fed: Ints
    first: Ints
    kinds: Ints
    kind_of: Mapping[int, int]
    source: int
    scorer: int

    def __len__(self) -> int:
        return len(self.first)

    def holds(self, role: str) -> Bools:
        return self.roles[role] if role in self.roles else np.zeros(len(self), dtype=np.bool_)

    def of_ranks(self, ranks: Iterable[int]) -> Bools:
        """Units with any of `ranks`, [U]."""
        found: Bools = np.isin(self.kinds, [self.kind_of[rank] for rank in ranks if rank in self.kind_of])
        return found

    @classmethod
    def of(cls, site: Site, *, single: bool = False) -> Units:
        """`single`: each rank is a unit."""

        def hops_to(rank: int) -> int:
            return 1 + hops_to(site.fed_by[rank]) if rank in site.fed_by else 0

        coords = {rank: [placement.coords(rank) for placement in site.placements.values()] for rank in site.ranks}
        held = {rank: tuple(each and each[:2] for each in own) for rank, own in coords.items()}
        hops = {rank: hops_to(rank) for rank in site.ranks}
        keys: dict[tuple[object, ...], int] = {}
        unit_of = {rank: keys.setdefault((held[rank], rank if single else hops[rank]), len(keys)) for rank in site.ranks}
        first_of: dict[int, int] = {}
        for rank, unit in unit_of.items():
            first_of.setdefault(unit, rank)
        first = list(first_of.values())
        numbers = {each: number for number, each in enumerate(dict.fromkeys(held.values()))}
        kind_of = {rank: numbers[own] for rank, own in held.items()}
        fed = sorted((hops[rank], unit_of[rank], unit_of[sender]) for rank, sender in site.fed_by.items())
        scorers = [role for role in site.placements if role != "actor"]
        scorer = "critic" if "critic" in scorers else next(iter(scorers), "actor")
        return cls(
            {role: np.array([held[rank][n] is not None for rank in first]) for n, role in enumerate(site.placements)},
            np.array([hops[rank] for rank in first], dtype=np.int64),
            np.array([pair[1:] for pair in dict.fromkeys(fed)], dtype=np.int64).reshape(-1, 2).T,
            np.array(first, dtype=np.int64),
            np.array([kind_of[rank] for rank in first], dtype=np.int64),
            kind_of,
            unit_of[site.source],
            unit_of[site.source if scorer == "actor" else site.placements[scorer].ranks[0]],
        )


@dataclass(frozen=True)
class Played:
    """Seconds, [U]; `arrived`: when decoding ranks have the chunk."""

    ends: Floats
    scored: Floats
    waited: Floats
    arrived: float | None
    spans: Callable[[], Iterable[Span]]


class Player:
    single_ranks = False

    def __init__(self, planner: RoundPlanner, round_s: float):
        self.planner, self.round_s, self.costs = planner, round_s, planner.costs
        self.units = Units.of(planner.site, single=self.single_ranks)
        self._components = list(components_of(planner.site, planner.generator, planner.costs))

    def plan(self, index: int, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None) -> Any:
        return self.planner.book(index, active, score, chunk, list, readable)[0]

    def play(self, done: Recorded, begun: Floats) -> Played:
        units, starts, none = self.units, begun + self.round_s, np.zeros(0, dtype=np.int64)
        clocks = np.full(int(units.kinds.max()) + 1, -np.inf)
        np.maximum.at(clocks, units.kinds, starts)  # units of a kind do everything together
        ends, scored = np.full_like(clocks, -np.inf), np.zeros_like(clocks)
        counts = Counts(none, none) if done.grown is None else Counts.of(done.grown.columns.seq_ids, self.tokens(done))
        begun_at = {rank: float(clocks[kind]) for rank, kind in units.kind_of.items()}
        for component in self._components:
            for rank, end, busy in component.play(done.planned, counts, begun_at):
                ends[units.kind_of[rank]], scored[units.kind_of[rank]] = end, busy
        return self._spread(done, starts, np.maximum(starts, ends[units.kinds]), scored[units.kinds])

    def tokens(self, done: Recorded) -> Ints:
        """A single replica stops when the batch is complete, several at the end of the chunk."""
        assert done.grown is not None and done.chunk is not None
        several = self.planner.site.placements["actor"].dp > 1
        return done.grown.counts if several else np.minimum(done.grown.counts, done.chunk.clock - done.begun)

    def _spread(self, done: Recorded, starts: Floats, ends: Floats, scored: Floats) -> Played:
        """Deliver the chunk: replicas gather it, senders pass it on after their own work."""
        units, message_s, due, arrived = self.units, self.costs.message_s, ends.copy(), None
        if done.chunk is not None:
            holds = units.holds("actor")
            if self.planner.site.placements["actor"].dp > 1:
                due[holds] = ends[holds].max() + message_s
            for hop in range(1, int(units.hops.max()) + 1):
                unit, sender = units.fed[:, units.hops[units.fed[0]] == hop]
                np.maximum.at(due, unit, due[sender] + message_s)
            arrived = float(due[units.source])
        waited = np.where(units.holds("actor"), 0.0, due - ends)
        return Played(due, scored, waited, arrived, lambda: self._spans(done.step, starts, ends, due, scored))

    def _spans(self, step: int, starts: Floats, ends: Floats, due: Floats, busy: Floats) -> Iterator[Span]:
        """Scoring comes first, even if woven."""
        holds, scorer = self.units.holds("actor"), next((role for role in self.units.roles if role != "actor"), "")
        columns = zip(*(each.tolist() for each in (self.units.first, holds, starts, ends, due, busy)), strict=True)
        for rank, decodes, start, end, whole, scored in columns:
            between = min(start + scored, end) if decodes else end
            if scored > 0:
                yield Span(rank, scorer, "score", step, start, between)
            if decodes and end > between:
                yield Span(rank, "actor", "decode", step, between, end)
            if not decodes and whole > end:
                yield Span(rank, "scorer", "wait_tokens", step, end, whole)
