"""Play rounds in virtual time: components, then the chunk's delivery. U units of ranks, K kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oppo_megatron.columns import Bools, Ints
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.trace import Span
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.sim.runs.components import Counts, Floats, components_of
from oppo_megatron.sim.runs.loop import Recorded


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
    """Seconds, [U]; `arrived`: when decoding ranks have the chunk, if any."""

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
