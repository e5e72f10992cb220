"""Rounds by laps: components are walked through, or a replica's pipeline is the formula of its lap.

Of a site of few ranks, and of the actor's output rank on any, the components are walked through unit by unit
(`runs/walks.py`).  Of many ranks the others follow from formulas over all replicas at once.

Legend: R replicas of a role, U units, K kinds of units, P stages, M decode micro-batches of a replica.  With w_p the seconds of
stage p for one micro-batch (its sample on the last) and h those of a message:

    lap      L = max(sum over M of max w_p, w_0 + ... + w_(P-1) + P h)     a decode step of all micro-batches
    prefill  stage p ends m micro-batches of t_p seconds m t_p after it began, or t_p + h after the stage before

A lap is of the sequences that still run in it: one that has ended leaves its micro-batch, and a micro-batch without any costs
nothing.  Roles on the same ranks follow each other, but for what woven rounds hide in the gaps of the laps: the others hide as
large a part of their scoring as the output rank's component does.  What else the formula misses of that component, it is taken
to miss of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.planning.book import Book
from oppo_megatron.schedule.planning.ledger import ordinal
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.costs import Costs, at_stage
from oppo_megatron.sim.runs.loop import Recorded
from oppo_megatron.sim.runs.played import Floats, Piece, Played
from oppo_megatron.sim.runs.units import NONE, Units
from oppo_megatron.sim.runs.walks import NONE_GROWS, Component, Counts, components_of

FEW = 16
"""Ranks of a site whose components are all walked through."""


def planned_rank(site: Site) -> int | None:
    """Whose component a planner has to know the micro-batches of; None: of all."""
    return None if len(site.ranks) <= FEW else site.source


@dataclass(frozen=True)
class LapRound:
    """A round's work: `prefill` by role is [3, R]: tokens, sequences, outputs.

    `round` has the micro-batches of the components that are walked through; decode micro-batches are `parts` of a replica, and
    those of scorers have `budget` tokens at most.
    """

    steps: int
    parts: int
    budget: int
    prefill: Mapping[str, Ints]
    round: Round


@dataclass(frozen=True)
class _Growing:
    """Of each sequence that is decoded, its replica and the tokens that it gets."""

    homes: Ints
    counts: Ints


class Laps:
    """Plays the rounds of one run.  `begun` [U] is when each unit begins a round."""

    def __init__(self, planner: RoundPlanner, units: Units, costs: Costs, round_s: float):
        self.planner, self.units, self.costs, self.round_s = planner, units, costs, round_s
        self.books: dict[str, Book] = {"actor": planner.actor, **planner.scorers}
        site, generator = planner.site, planner.generator
        self._all = planner.rank is None
        if planner.rank is None:
            self._walked = list(components_of(site, generator, planner.costs))
        else:
            self._walked = [Component(site, planner.rank, generator, planner.costs)]
        self._seats = {role: _seats(site, role, units) for role in site.placements}

    def plan(
        self, index: int, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None
    ) -> LapRound:
        """The books advance; what they add is the round's work."""
        before = {role: book.prefilled.copy() for role, book in self.books.items()}
        booked = self.planner.book(active, score, chunk, list, readable)
        added = {role: book.prefilled - before[role] for role, book in self.books.items()}
        return LapRound(
            booked.steps, booked.cut.micro_batches, booked.cut.prefill_tokens, added, booked.round(index)
        )

    def play(self, done: Recorded[LapRound], begun: Floats) -> Played:
        units, starts = self.units, begun + self.round_s
        clocks, scored = np.full(units.num_kinds, -np.inf), np.zeros(units.num_kinds)
        np.maximum.at(clocks, units.kinds, starts)  # units of a kind meet in whatever they do
        ends = clocks.copy()
        if not self._all:
            drains = self._score(done.planned, ends, scored)
            if done.chunk is not None:
                self._decode(done, clocks, ends, scored, drains)
        else:
            self._walk(done, clocks, ends, scored)
        own = np.where(ends > clocks, ends, -np.inf)[units.kinds]
        own = np.maximum(own, starts)
        return self._spread(done, starts, own, scored[units.kinds])

    def _spread(self, done: Recorded[LapRound], starts: Floats, ends: Floats, scored: Floats) -> Played:
        """The chunk reaches everybody: the actor's replicas gather, and others are sent it when the sender has done its part."""
        waited = np.zeros_like(ends)
        if done.chunk is None:
            return Played(ends, scored, waited, None, lambda: self._pieces(starts, ends, ends, scored))
        units, message_s, due = self.units, self.costs.message_s, ends.copy()
        holds = units.holds("actor")
        if self.planner.site.placements["actor"].dp > 1:
            due[holds] = ends[holds].max() + message_s
        for hop in range(1, int(units.hops.max()) + 1):
            unit, sender = units.fed[:, units.hops[units.fed[0]] == hop]
            np.maximum.at(due, unit, due[sender] + message_s)
        waited = np.where(holds, 0.0, due - ends)
        return Played(due, scored, waited, float(due[units.source]), lambda: self._pieces(starts, ends, due, scored))

    def _pieces(self, starts: Floats, ends: Floats, due: Floats, busy: Floats) -> Iterable[Piece]:
        """A unit's first rank stands for it; scoring comes first, wherever it was woven in."""
        holds, scorer = self.units.holds("actor"), next((role for role in self.units.replicas if role != "actor"), "")
        columns = zip(self.units.first, holds, starts, ends, due, busy, strict=True)
        for rank, decodes, start, end, whole, scored in (tuple(each) for each in columns):
            between = min(start + scored, end) if decodes else end
            if scored > 0:
                yield Piece(int(rank), scorer, "score", float(start), float(between))
            if decodes and end > between:
                yield Piece(int(rank), "actor", "decode", float(between), float(end))
            if not decodes and whole > end:
                yield Piece(int(rank), "scorer", "wait_tokens", float(end), float(whole))

    def _walk(self, done: Recorded[LapRound], clocks: Floats, ends: Floats, scored: Floats) -> None:
        """Walk through the components: `ends` and `scored` [K] of their kinds are set, which begin at `clocks` [K]."""
        counts = NONE_GROWS
        if done.grown is not None:
            counts = Counts.of(done.grown.columns.seq_ids, self._counts(done))
        kind_of = self.units.kind_of
        for component in self._walked:
            begun = {rank: float(clocks[kind_of[rank]]) for rank in component.ranks}
            walk = component.walk(done.planned.round, counts, begun)
            for rank, end in walk.ends.items():
                ends[kind_of[rank]], scored[kind_of[rank]] = end, walk.scored[rank]

    def _score(self, planned: LapRound, ends: Floats, scored: Floats) -> Floats:
        """Each role in turn on all ranks: `ends` and `scored` [K] move on.  Returns what drains behind each kind's last, [K]."""
        drains = np.zeros_like(ends)
        for role, seats in self._seats.items():
            if role == "actor" or not planned.prefill[role].any():
                continue
            count, seconds, largest = self._prefilled(role, planned.prefill[role], planned.budget)
            works, message_s = count > 0, self.costs.message_s
            drain = largest.sum(axis=0) - largest.max(axis=0) + (len(largest) - 1) * message_s
            arrives = last = np.full(len(count), -np.inf)
            for (kinds, replicas), each in zip(seats, seconds, strict=True):
                start = arrives.copy()
                np.maximum.at(start, replicas, ends[kinds])
                end = np.maximum(start + count * each, last + message_s + each)
                arrives, last = start + each + message_s, end
                here = works[replicas]
                ends[kinds[here]] = end[replicas[here]]
                scored[kinds[here]] += (count * each)[replicas[here]]
                drains[kinds[here]] = np.maximum(drains[kinds[here]], drain[replicas[here]])
        return drains

    def _decode(self, done: Recorded[LapRound], clocks: Floats, ends: Floats, scored: Floats, drains: Floats) -> None:
        """Decoding beside what was scored, in place of that on the actor's ranks."""
        seats = self._seats["actor"]
        (busy, drain, starts), size = np.zeros((3, len(self.planner.actor))), len(self.planner.actor)
        starts = np.full(size, -np.inf)
        for kinds, replicas in seats:
            for mine, theirs in ((busy, scored), (drain, drains), (starts, clocks)):
                np.maximum.at(mine, replicas, theirs[kinds])
        self._walk(done, clocks, ends, scored)
        walked = list(self._walked[0].replicas["actor"])
        (kinds, replicas) = seats[-1]
        known = np.array([ends[kinds[replicas == each]].max() for each in walked]) - starts[walked]
        own, beside = self._decoded(done, busy, drain)
        place = int(known.argmax())
        seen, alone = known[place], own[walked[place]]
        if beside is None:
            seconds = own * (seen / alone if alone > 0 else 1.0)
        else:
            most = beside[walked[place]]
            share = min(1.0, max(0.0, (seen - alone) / most)) if most > 0 else 1.0
            seconds = np.maximum(own + share * beside, beside)
        seconds[walked] = known
        for kinds, replicas in seats:
            ends[kinds] = (starts + seconds)[replicas]

    def _prefilled(self, role: str, work: Ints, budget: int) -> tuple[Ints, Floats, Floats]:
        """Of a role's prefill by replica: micro-batches [R], seconds of one by stage, [P, R], and of the largest."""
        tokens, sequences, outputs = work
        count = micro_batches(tokens, sequences, budget)
        each, share = tokens / np.maximum(count, 1), np.minimum(1.0, budget / np.maximum(1, tokens))
        seconds = self._stages(role, each, outputs / np.maximum(count, 1))
        return count, seconds, self._stages(role, share * tokens, share * outputs)  # the first bins are filled first

    def _stages(self, role: str, tokens: Floats, outputs: Floats) -> Floats:
        """Seconds of a prefill micro-batch, [P, R]."""
        lines = [self.costs.prefill_at(role, stage) for stage in range(self.planner.site.placements[role].pp)]
        seconds = np.stack([line.fixed_s + tokens * line.per_token_s for line in lines])
        if role != "actor":
            seconds[-1] += self.costs.score.fixed_s + outputs * self.costs.score.per_token_s
        return seconds

    def _decoded(self, done: Recorded[LapRound], busy: Floats, drain: Floats) -> tuple[Floats, Floats | None]:
        """Seconds of the replicas that decode, [R], with their scoring (`busy`, `drain`); or without, and what that takes."""
        placement, growing, parts = self.planner.site.placements["actor"], self._growing(done), done.planned.parts
        count, prefills, largest = self._prefilled("actor", done.planned.prefill["actor"], self.planner.micro_batch_tokens)
        prefill = count * prefills.max(axis=0)
        lane = growing.homes * parts + portions(growing.homes, placement.dp, parts)
        if placement.pp == 1:
            laps = self._single(lane, growing.counts, placement.dp * parts).reshape(-1, parts).sum(axis=1)
            return busy + drain + prefill + laps, None
        last = largest.sum(axis=0) - largest.max(axis=0) + (len(largest) - 1) * self.costs.message_s
        own_drain = np.where(count > 0, last, 0.0)
        laps, fill = self._pipelined(lane, growing.counts, (placement.dp, parts), placement.pp)
        if self.planner.generator == "woven":
            return prefill + own_drain + laps - np.minimum(own_drain, fill), busy + drain
        behind = np.maximum(drain, own_drain)  # all of it is one pipeline, which drains once before the laps
        return busy + prefill + behind + laps - np.minimum(behind, fill), None

    def _counts(self, done: Recorded[LapRound]) -> Ints:
        """A single replica knows when the batch is complete; several go on to the end of the chunk, and are cut there."""
        assert done.grown is not None and done.chunk is not None
        counts = done.grown.counts
        if self.planner.site.placements["actor"].dp == 1:
            counts = np.minimum(counts, done.chunk.clock - done.begun)
        return counts

    def _growing(self, done: Recorded[LapRound]) -> _Growing:
        assert done.grown is not None
        return _Growing(self.planner.actor.homes(done.grown.columns), self._counts(done))

    def _single(self, lane: Ints, counts: Ints, lanes: int) -> Floats:
        """Of one stage: each micro-batch until its last sequence ends, [lanes]."""
        steps, tokens = np.zeros(lanes, dtype=np.int64), np.bincount(lane, counts, lanes)
        np.maximum.at(steps, lane, counts)
        decode, sample = at_stage(self.costs.decode, 0), self.costs.sample
        seconds: Floats = steps * (decode.fixed_s + sample.fixed_s) + tokens * (decode.per_token_s + sample.per_token_s)
        return seconds

    def _pipelined(self, lane: Ints, counts: Ints, shape: tuple[int, int], pp: int) -> tuple[Floats, Floats]:
        """Of several stages: the laps of every decode step with the way of the last one through the stages, [R].

        And, of that, the first one's until the last stage begins, [R].
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
        laps = np.maximum(slowest.sum(axis=1), through)
        last = np.maximum(alive.sum(axis=1) - 1, 0)[:, None]
        final = np.take_along_axis(slowest.sum(axis=1) - slowest.max(axis=1) + through - laps, last, axis=1)[:, 0]
        fill = busy[:-1].sum(axis=0)[:, 0, 0] + (pp - 1) * message_s
        return laps.sum(axis=1) + final, fill


def _seats(site: Site, role: str, units: Units) -> list[tuple[Ints, Ints]]:
    """By stage of a role, the kinds of units that have it, and of which replica."""
    placement = site.placements[role]
    seats = []
    for stage in range(placement.pp):
        pairs = {(units.kind_of[rank], d) for d in range(placement.dp) for rank in placement.stage_ranks(d, stage)}
        kinds, replicas = np.array(sorted(pairs), dtype=np.int64).T
        seats.append((kinds, replicas))
    return seats


def micro_batches(tokens: Ints, sequences: Ints, budget: int) -> Ints:
    """How many micro-batches of at most `budget` tokens hold so many sequences of equal length, [R]."""
    length = np.maximum(1, -(-tokens // np.maximum(1, sequences)))
    found: Ints = np.maximum(-(-tokens // budget), -(-sequences // np.maximum(1, budget // length)))
    return np.where(tokens > 0, found, 0)


def portions(homes: Ints, replicas: int, parts: int) -> Ints:
    """The micro-batch of each sequence: those of a replica, in order, in runs that differ by one at most, longer ones first."""
    place = ordinal(homes)
    short, longer = np.divmod(np.bincount(homes, minlength=replicas), parts)
    short, longer = short[homes], longer[homes]
    ahead = longer * (short + 1)
    found: Ints = np.where(place < ahead, place // (short + 1), longer + (place - ahead) // np.maximum(1, short))
    return found
