"""Play the rounds of a run in virtual time.

On a site of few ranks, and for the actor's output rank on any, the components are played unit by unit (`runs/components.py`).
On more ranks the others follow from formulas over all replicas at once.

Legend: R replicas of a role, U units, K kinds of units, P stages, M decode micro-batches of a replica, B micro-batches.  With w_p
the seconds of stage p for one micro-batch (sampling included on the last) and h those of a message:

    decode step  max(sum over M of max w_p, w_0 + ... + w_(P-1) + P h)     one pass of all micro-batches
    prefill      stage p ends m micro-batches of t_p seconds m t_p after it began, or t_p + h after the stage before

A micro-batch has the sequences that still run; without any it costs nothing.  Roles on the same ranks follow each other, apart
from what woven rounds hide in the gaps of decoding: the others hide the same part of their scoring as the output rank's
component.  Other errors of the formulas for that component are assumed for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.trace import Span
from oppo_megatron.schedule.packing import packed_in_order
from oppo_megatron.schedule.planning.book import Book
from oppo_megatron.schedule.planning.ledger import ordinal
from oppo_megatron.schedule.planning.planner import BookedRound, RoundPlanner
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.costs import Costs, at_stage
from oppo_megatron.sim.runs.components import NONE_GROWS, Component, Counts, components_of
from oppo_megatron.sim.runs.loop import Recorded
from oppo_megatron.sim.runs.units import Floats, Played, Units

FEW = 16
"""Ranks of a site whose components are all played unit by unit; of a larger site's component, if a formula can replace it."""


def planned_rank(site: Site) -> int | None:
    """Return the rank whose component's micro-batches a planner needs; None: of all ranks."""
    return None if len(site.ranks) <= FEW else site.source


@dataclass(frozen=True)
class PlayedRound:
    """The work of a round.

    `prefill` by role, [2, R, B]: tokens and outputs of each replica's micro-batches; `parts`: decode micro-batches of a replica;
    `round`: the micro-batches of the components that are played unit by unit.
    """

    steps: int
    parts: int
    prefill: Mapping[str, Ints]
    round: Round


class _Exact(NamedTuple):
    """Kinds of units that are played exactly, [w]; when each ends its round, and seconds of its scoring."""

    kinds: Ints
    ends: Floats
    scored: Floats


class Player:
    """Plays the rounds of one run."""

    def __init__(self, planner: RoundPlanner, units: Units, costs: Costs, round_s: float):
        self.planner, self.units, self.costs, self.round_s = planner, units, costs, round_s
        self.books: dict[str, Book] = {"actor": planner.actor, **planner.scorers}
        site, generator = planner.site, planner.generator
        self._all = planner.rank is None
        self._exact_components = list(components_of(site, generator, planner.costs)) if planner.rank is None else []
        if planner.rank is not None:
            own = Component(site, planner.rank, generator, planner.costs)
            weaves = generator == "woven" and site.placements["actor"].pp > 1  # gaps have no formula
            self._exact_components = [own] if weaves or len(own.ranks) <= FEW else []
        held = {kind: _stages(site, rank) for rank, kind in units.kind_of.items()}
        numbers = {each: number for number, each in enumerate(dict.fromkeys(held.values()))}
        self._stages = np.array([numbers[held[kind]] for kind in range(units.num_kinds)], dtype=np.int64)
        self._seats = {role: _seats(site, role, units) for role in site.placements}
        decoding = {units.kind_of[rank] for rank in site.placements["actor"].ranks}
        ranks = {role: placement.ranks for role, placement in site.placements.items()}
        self._decoders = {role for role, own in ranks.items() if {units.kind_of[rank] for rank in own} <= decoding}

    def plan(
        self, index: int, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None
    ) -> PlayedRound:
        """Plan a round; the records of the planner advance, and what they add is its work."""
        booked = self.planner.book(active, score, chunk, list, readable)
        added = {} if self._all else self._added(booked)
        return PlayedRound(booked.steps, booked.cut.micro_batches, added, booked.round(index))

    def _added(self, booked: BookedRound) -> dict[str, Ints]:
        """Return the added work of each role's replicas by micro-batch; roles that read the same are packed once."""
        added, known = {}, dict[tuple[int, int, bytes], Ints]()
        for role in booked.works:
            grown, replicas = np.stack(self.books[role].grown).astype(np.int64), len(self.books[role])
            budget = self.planner.micro_batch_tokens if role == "actor" else booked.cut.prefill_tokens
            key = replicas, budget, grown[[0, 1, 3]].tobytes()
            if key not in known:
                known[key] = packed_bins(grown, replicas, budget)
            added[role] = micro_batches(grown, replicas, known[key])
        return added

    def play(self, done: Recorded[PlayedRound], begun: Floats) -> Played:
        units, starts = self.units, begun + self.round_s
        clocks, scored = np.full(units.num_kinds, -np.inf), np.zeros(units.num_kinds)
        np.maximum.at(clocks, units.kinds, starts)  # units of a kind do everything together
        ends, exact = clocks.copy(), self._play_exactly(done, clocks)
        if not self._all:
            drains = self._score(done.planned, ends, scored)
            ends = clocks + (ends - clocks) * self._missed(clocks, ends, exact)
            if done.chunk is not None:
                self._decode(done, clocks, ends, (scored, drains), exact)
        ends[exact.kinds], scored[exact.kinds] = exact.ends, exact.scored
        own_ends = np.maximum(starts, np.where(ends > clocks, ends, -np.inf)[units.kinds])
        return self._spread(done, starts, own_ends, scored[units.kinds])

    def _spread(self, done: Recorded[PlayedRound], starts: Floats, ends: Floats, scored: Floats) -> Played:
        """Deliver the chunk: the actor's replicas gather it, then each sender passes it on when it is done with its part."""
        if done.chunk is None:
            return Played(
                ends, scored, np.zeros_like(ends), None, lambda: self._spans(done.step, starts, ends, ends, scored)
            )
        units, message_s, due = self.units, self.costs.message_s, ends.copy()
        holds = units.holds("actor")
        if self.planner.site.placements["actor"].dp > 1:
            due[holds] = ends[holds].max() + message_s
        for hop in range(1, int(units.hops.max()) + 1):
            unit, sender = units.fed[:, units.hops[units.fed[0]] == hop]
            np.maximum.at(due, unit, due[sender] + message_s)
        waited, arrived = np.where(holds, 0.0, due - ends), float(due[units.source])
        return Played(due, scored, waited, arrived, lambda: self._spans(done.step, starts, ends, due, scored))

    def _spans(self, step: int, starts: Floats, ends: Floats, due: Floats, busy: Floats) -> Iterator[Span]:
        """Spans of each unit's first rank; scoring comes first, even if it was woven in."""
        holds, scorer = self.units.holds("actor"), next((role for role in self.units.replicas if role != "actor"), "")
        columns = zip(*(each.tolist() for each in (self.units.first, holds, starts, ends, due, busy)), strict=True)
        for rank, decodes, start, end, whole, scored in columns:
            between = min(start + scored, end) if decodes else end
            if scored > 0:
                yield Span(rank, scorer, "score", step, start, between)
            if decodes and end > between:
                yield Span(rank, "actor", "decode", step, between, end)
            if not decodes and whole > end:
                yield Span(rank, "scorer", "wait_tokens", step, end, whole)

    def _play_exactly(self, done: Recorded[PlayedRound], clocks: Floats) -> _Exact:
        """Play the components unit by unit; their kinds begin at `clocks` [K]."""
        counts, kind_of, played = NONE_GROWS, self.units.kind_of, list[tuple[int, float, float]]()
        if done.grown is not None:
            counts = Counts.of(done.grown.columns.seq_ids, self._counts(done))
        for component in self._exact_components:
            begun = {rank: float(clocks[kind_of[rank]]) for rank in component.ranks}
            found = component.play(done.planned.round, counts, begun)
            played += [(kind_of[rank], end, found.scored[rank]) for rank, end in found.ends.items()]
        kinds, ends, scored = zip(*played, strict=True) if played else ((), (), ())
        return _Exact(np.array(kinds, dtype=np.int64), np.array(ends), np.array(scored))

    def _missed(self, clocks: Floats, ends: Floats, exact: _Exact) -> Floats:
        """Ratio of exact seconds to the formula's, for kinds that have the same stages as an exact one, else 1, [K]."""
        seconds, formula = exact.ends - clocks[exact.kinds], (ends - clocks)[exact.kinds]
        which, most = self._stages[exact.kinds[formula > 0]], self._stages.max() + 1
        sums = [np.bincount(which, each[formula > 0], most).astype(np.float64) for each in (seconds, formula)]
        factors: Floats = np.divide(sums[0], sums[1], out=np.ones(most), where=sums[1] > 0)[self._stages]
        return factors

    def _score(self, planned: PlayedRound, ends: Floats, scored: Floats) -> Floats:
        """Add the micro-batches of all roles, in turn, to `ends` and `scored` [K].

        Returns the seconds in which the pipeline drains after each kind's last, [K].
        """
        drains, rolled = np.zeros_like(ends), list[tuple[str, Floats]]()
        for role in self._seats:
            if role != "actor" and role in planned.prefill:
                rolled.append((role, self._prefilled(role, planned.prefill[role])))
        for role, seconds in rolled:
            for (kinds, replicas), own in zip(self._seats[role], seconds, strict=True):
                scored[kinds] += own.sum(axis=1)[replicas]
                drains[kinds] = np.maximum(drains[kinds], self._drain(seconds)[replicas])
        if planned.steps:  # the actor's ranks are computed with decoding
            rolled = [(role, seconds) for role, seconds in rolled if role not in self._decoders]
        if all(len(seconds) == 1 for _, seconds in rolled):  # without stages, the order does not matter
            rolled = [(role, seconds.sum(axis=2, keepdims=True)) for role, seconds in rolled]
        for nth in range(max((seconds.shape[2] for _, seconds in rolled), default=0)):
            for role, seconds in rolled:
                if nth < seconds.shape[2]:
                    self._pass_through(role, seconds[:, :, nth], ends)
        return drains

    def _pass_through(self, role: str, seconds: Floats, ends: Floats) -> None:
        """Pass one micro-batch of each replica, [P, R], through the stages, and advance `ends` [K]."""
        ready = np.full(seconds.shape[1], -np.inf)
        for (kinds, replicas), own in zip(self._seats[role], seconds, strict=True):
            np.maximum.at(ready, replicas, ends[kinds])
            ready += own
            there = own[replicas] > 0
            ends[kinds[there]] = ready[replicas[there]]
            ready += self.costs.message_s

    def _decode(
        self,
        done: Recorded[PlayedRound],
        clocks: Floats,
        ends: Floats,
        scoring: tuple[Floats, Floats],
        exact: _Exact,
    ) -> None:
        """Set `ends` [K] of the actor's kinds, which also have `scoring` (its seconds and its drains, [K])."""
        seats, size = self._seats["actor"], len(self.planner.actor)
        busy, drain, begun, known = np.zeros(size), np.zeros(size), np.full(size, -np.inf), np.zeros(size)
        known_ends = np.zeros_like(clocks)
        known_ends[exact.kinds] = exact.ends
        for kinds, replicas in seats:
            for mine, theirs in ((busy, scoring[0]), (drain, scoring[1]), (begun, clocks), (known, known_ends)):
                np.maximum.at(mine, replicas, theirs[kinds])
        own, beside = self._decoded(done, busy, drain)
        place = int(known.argmax())
        seen = known[place] - begun[place]
        if beside is None:
            seconds = own * (seen / own[place] if len(exact.kinds) and own[place] > 0 else 1.0)
        else:
            share = min(1.0, max(0.0, (seen - own[place]) / beside[place])) if beside[place] > 0 else 1.0
            seconds = np.maximum(own + share * beside, beside)
        for kinds, replicas in seats:
            ends[kinds] = (begun + seconds)[replicas]

    def _prefilled(self, role: str, work: Ints) -> Floats:
        """Seconds of each micro-batch of a role by stage, [P, R, B]; 0 if there is none."""
        (tokens, outputs), costs = work, self.costs
        lines = [costs.prefill_at(role, stage) for stage in range(self.planner.site.placements[role].pp)]
        seconds = np.stack([line.fixed_s + tokens * line.per_token_s for line in lines])
        if role != "actor":
            seconds[-1] += costs.score.fixed_s + outputs * costs.score.per_token_s
        return np.where(tokens > 0, seconds, 0.0)

    def _drain(self, seconds: Floats) -> Floats:
        """Seconds of the other stages for the largest micro-batch of a prefill [P, R, B], which comes first, [R]."""
        largest = seconds[:, :, 0]
        drain = largest.sum(axis=0) - largest.max(axis=0) + (len(largest) - 1) * self.costs.message_s
        return np.where(largest.any(axis=0), drain, 0.0)

    def _decoded(self, done: Recorded[PlayedRound], busy: Floats, drain: Floats) -> tuple[Floats, Floats | None]:
        """Seconds of the decoding replicas, [R], with or without their scoring (`busy`, `drain`), and seconds of scoring."""
        placement, parts = self.planner.site.placements["actor"], done.planned.parts
        assert done.grown is not None
        replica_of, counts = self.planner.actor.homes(done.grown.columns), self._counts(done)
        prefills = self._prefilled("actor", done.planned.prefill["actor"])
        prefill, own_drain = prefills.max(axis=0).sum(axis=1), self._drain(prefills)
        lane = replica_of * parts + portions(replica_of, placement.dp, parts)
        if placement.pp == 1:
            passes = self._single(lane, counts, placement.dp * parts).reshape(-1, parts).sum(axis=1)
            return busy + drain + prefill + passes, None
        passes, fill = self._pipelined(lane, counts, (placement.dp, parts), placement.pp)
        if self.planner.generator == "woven":
            return prefill + own_drain + passes - np.minimum(own_drain, fill), busy + drain
        behind = np.maximum(drain, own_drain)  # one pipeline, which drains once before decoding
        return busy + prefill + behind + passes - np.minimum(behind, fill), None

    def _counts(self, done: Recorded[PlayedRound]) -> Ints:
        """Tokens of each sequence: a single replica stops when the batch is complete, several at the end of the chunk."""
        assert done.grown is not None and done.chunk is not None
        counts = done.grown.counts
        if self.planner.site.placements["actor"].dp == 1:
            counts = np.minimum(counts, done.chunk.clock - done.begun)
        return counts

    def _single(self, lane: Ints, counts: Ints, lanes: int) -> Floats:
        """Seconds of each decode micro-batch on one stage, until its last sequence ends, [lanes]."""
        steps, tokens = np.zeros(lanes, dtype=np.int64), np.bincount(lane, counts, lanes)
        np.maximum.at(steps, lane, counts)
        decode, sample = at_stage(self.costs.decode, 0), self.costs.sample
        seconds: Floats = steps * (decode.fixed_s + sample.fixed_s) + tokens * (decode.per_token_s + sample.per_token_s)
        return seconds

    def _pipelined(self, lane: Ints, counts: Ints, shape: tuple[int, int], pp: int) -> tuple[Floats, Floats]:
        """Seconds of all decode steps on several stages, the last one's way through the stages included, [R].

        Also the part until the last stage begins for the first time, [R].
        """
        (replicas, parts), steps = shape, int(counts.max(initial=0))
        ended = np.bincount(lane * (steps + 1) + counts, minlength=replicas * parts * (steps + 1))
        ended = ended.reshape(replicas, parts, steps + 1)
        running = ended[:, :, ::-1].cumsum(axis=2)[:, :, ::-1][:, :, 1:]  # with more than 0, 1 .. tokens to get
        lines, message_s = [self.costs.decode_at(stage) for stage in range(pp)], self.costs.message_s
        busy = np.stack([np.where(running > 0, line.fixed_s + running * line.per_token_s, 0.0) for line in lines])
        sample = self.costs.sample
        busy[-1] += np.where(running > 0, sample.fixed_s + running * sample.per_token_s, 0.0)
        slowest, alive = busy.max(axis=0), (running > 0).any(axis=1)
        through = busy.sum(axis=0).max(axis=1) + pp * message_s * alive
        passes = np.maximum(slowest.sum(axis=1), through)
        last = np.maximum(alive.sum(axis=1) - 1, 0)[:, None]
        final = np.take_along_axis(slowest.sum(axis=1) - slowest.max(axis=1) + through - passes, last, axis=1)[:, 0]
        fill = busy[:-1].sum(axis=0)[:, 0, 0] + (pp - 1) * message_s
        return passes.sum(axis=1) + final, fill


def _stages(site: Site, rank: int) -> tuple[int | None, ...]:
    """The rank's stage of each role."""
    found = (placement.coords(rank) for placement in site.placements.values())
    return tuple(None if coords is None else coords.stage for coords in found)


def _seats(site: Site, role: str, units: Units) -> list[tuple[Ints, Ints]]:
    """By stage of a role, the kinds of units that have it, and their replicas."""
    placement = site.placements[role]
    seats = []
    for stage in range(placement.pp):
        pairs = {(units.kind_of[rank], d) for d in range(placement.dp) for rank in placement.stage_ranks(d, stage)}
        kinds, replicas = np.array(sorted(pairs), dtype=np.int64).T
        seats.append((kinds, replicas))
    return seats


def micro_batches(grown: Ints, replicas: int, bins: Ints) -> Ints:
    """Tokens and outputs of each replica's micro-batches, [2, R, B]; 0 if there is none.

    `grown` [4, n]: replica, tokens, outputs of each sequence, and whether it continues a fork; `bins` [n]: its micro-batch.
    """
    width = int(bins.max(initial=0)) + 1
    sums = [np.bincount(grown[0] * width + bins, each, replicas * width) for each in grown[1:3]]
    return np.stack(sums).astype(np.int64).reshape(2, replicas, width)


def packed_bins(grown: Ints, replicas: int, budget: int) -> Ints:
    """The micro-batch, of at most `budget` tokens, of each sequence of `grown` [4, n], [n].

    A sequence that continues a fork comes after what it forks, in another micro-batch.
    """
    (replica_of, tokens, *_), late = grown, grown[3]
    bins = np.zeros(len(replica_of), dtype=np.int64)
    for part in np.flatnonzero(late == 0), np.flatnonzero(late):
        bins[part] = _bins(replica_of[part], tokens[part], replicas, budget)
    if late.any():
        bins += late * (int(bins[late == 0].max(initial=0)) + 1)
    return bins


def _bins(replica_of: Ints, tokens: Ints, replicas: int, budget: int) -> Ints:
    """The micro-batch of each sequence, as by `packed_in_order`."""
    bins = np.zeros(len(replica_of), dtype=np.int64)
    for replica in np.flatnonzero(np.bincount(replica_of, tokens, replicas) > budget).tolist():
        own = np.flatnonzero(replica_of == replica)
        order, ends = packed_in_order(tokens[own], budget)
        bins[own[order]] = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    return bins


def portions(replica_of: Ints, replicas: int, parts: int) -> Ints:
    """The decode micro-batch of each sequence: runs of a replica's sequences in order, longer ones first by at most one."""
    place = ordinal(replica_of)
    short, longer = np.divmod(np.bincount(replica_of, minlength=replicas), parts)
    short, longer = short[replica_of], longer[replica_of]
    ahead = longer * (short + 1)
    found: Ints = np.where(place < ahead, place // (short + 1), longer + (place - ahead) // np.maximum(1, short))
    return found
