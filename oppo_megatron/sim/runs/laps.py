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
from typing import NamedTuple

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.packing import packed_in_order
from oppo_megatron.schedule.planning.book import Book
from oppo_megatron.schedule.planning.ledger import ordinal
from oppo_megatron.schedule.planning.planner import BookedRound, RoundPlanner
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.costs import Costs, at_stage
from oppo_megatron.sim.runs.loop import Recorded
from oppo_megatron.sim.runs.played import Floats, Piece, Played
from oppo_megatron.sim.runs.units import Units
from oppo_megatron.sim.runs.walks import NONE_GROWS, Component, Counts, components_of

MANY = 8
"""Sequences of a replica for which packing one replica after the other takes less time than all at once."""

FEW = 16
"""Ranks of a site whose components are all walked through; of a larger site's component, where a formula can do it instead."""


def planned_rank(site: Site) -> int | None:
    """Whose component a planner has to know the micro-batches of; None: of all."""
    return None if len(site.ranks) <= FEW else site.source


@dataclass(frozen=True)
class LapRound:
    """A round's work: `prefill` by role is [2, R, B]: tokens and outputs of each replica's micro-batches; of decode micro-batches
    a replica has `parts`.  `round` has the micro-batches of the components that are walked through.
    """

    steps: int
    parts: int
    prefill: Mapping[str, Ints]
    round: Round


@dataclass(frozen=True)
class _Growing:
    """Of each sequence that is decoded, its replica and the tokens that it gets."""

    homes: Ints
    counts: Ints


class _Walked(NamedTuple):
    """Kinds whose round has been walked through, [w]; when it has ended on each, and what that has scored."""

    kinds: Ints
    ends: Floats
    scored: Floats


class Laps:
    """Plays the rounds of one run.  `begun` [U] is when each unit begins a round."""

    def __init__(self, planner: RoundPlanner, units: Units, costs: Costs, round_s: float):
        self.planner, self.units, self.costs, self.round_s = planner, units, costs, round_s
        self.books: dict[str, Book] = {"actor": planner.actor, **planner.scorers}
        site, generator = planner.site, planner.generator
        self._all = planner.rank is None
        self._walked = list(components_of(site, generator, planner.costs)) if planner.rank is None else []
        if planner.rank is not None:
            own = Component(site, planner.rank, generator, planner.costs)
            weaves = generator == "woven" and site.placements["actor"].pp > 1  # no formula tells what gaps hide
            self._walked = [own] if weaves or len(own.ranks) <= FEW else []
        held = {kind: _stages(site, rank) for rank, kind in units.kind_of.items()}
        numbers = {each: number for number, each in enumerate(dict.fromkeys(held.values()))}
        self._alike = np.array([numbers[held[kind]] for kind in range(units.num_kinds)], dtype=np.int64)
        self._seats = {role: _seats(site, role, units) for role in site.placements}
        decoding = {units.kind_of[rank] for rank in site.placements["actor"].ranks}
        ranks = {role: placement.ranks for role, placement in site.placements.items()}
        self._decoders = {role for role, own in ranks.items() if {units.kind_of[rank] for rank in own} <= decoding}

    def plan(
        self, index: int, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None
    ) -> LapRound:
        """The books advance; what they add is the round's work."""
        booked = self.planner.book(active, score, chunk, list, readable)
        added = {} if self._all else self._added(booked)
        return LapRound(booked.steps, booked.cut.micro_batches, added, booked.round(index))

    def _added(self, booked: BookedRound) -> dict[str, Ints]:
        """What the books have added to the replicas of each role, by micro-batch; roles that read the same are packed once."""
        added, known = {}, dict[tuple[int, int, bytes], Ints]()
        for role in booked.works:
            grown, replicas = np.stack(self.books[role].grown).astype(np.int64), len(self.books[role])
            budget = self.planner.micro_batch_tokens if role == "actor" else booked.cut.prefill_tokens
            key = replicas, budget, grown[[0, 1, 3]].tobytes()
            if key not in known:
                known[key] = packed_bins(grown, replicas, budget)
            added[role] = micro_batches(grown, replicas, known[key])
        return added

    def play(self, done: Recorded[LapRound], begun: Floats) -> Played:
        units, starts = self.units, begun + self.round_s
        clocks, scored = np.full(units.num_kinds, -np.inf), np.zeros(units.num_kinds)
        np.maximum.at(clocks, units.kinds, starts)  # units of a kind meet in whatever they do
        ends, walked = clocks.copy(), self._walk(done, clocks)
        if not self._all:
            drains = self._score(done.planned, ends, scored)
            ends = clocks + (ends - clocks) * self._missed(clocks, ends, walked)
            if done.chunk is not None:
                self._decode(done, clocks, ends, (scored, drains), walked)
        ends[walked.kinds], scored[walked.kinds] = walked.ends, walked.scored
        own_ends = np.maximum(starts, np.where(ends > clocks, ends, -np.inf)[units.kinds])
        return self._spread(done, starts, own_ends, scored[units.kinds])

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

    def _walk(self, done: Recorded[LapRound], clocks: Floats) -> _Walked:
        """Walk through the components, whose kinds begin at `clocks` [K]."""
        counts, kind_of, walks = NONE_GROWS, self.units.kind_of, list[tuple[int, float, float]]()
        if done.grown is not None:
            counts = Counts.of(done.grown.columns.seq_ids, self._counts(done))
        for component in self._walked:
            begun = {rank: float(clocks[kind_of[rank]]) for rank in component.ranks}
            walk = component.walk(done.planned.round, counts, begun)
            walks += [(kind_of[rank], end, walk.scored[rank]) for rank, end in walk.ends.items()]
        kinds, ends, scored = zip(*walks, strict=True) if walks else ((), (), ())
        return _Walked(np.array(kinds, dtype=np.int64), np.array(ends), np.array(scored))

    def _missed(self, clocks: Floats, ends: Floats, walked: _Walked) -> Floats:
        """By what the formulas are wrong about the scoring of kinds that hold what a walked one does, [K]."""
        seen, told = walked.ends - clocks[walked.kinds], (ends - clocks)[walked.kinds]
        which, most = self._alike[walked.kinds[told > 0]], self._alike.max() + 1
        sums = [np.bincount(which, each[told > 0], most).astype(np.float64) for each in (seen, told)]
        factors: Floats = np.divide(sums[0], sums[1], out=np.ones(most), where=sums[1] > 0)[self._alike]
        return factors

    def _score(self, planned: LapRound, ends: Floats, scored: Floats) -> Floats:
        """The micro-batches of all roles by turns: `ends` and `scored` [K] move on.

        Returns what drains behind each kind's last, [K].
        """
        drains, rolled = np.zeros_like(ends), list[tuple[str, Floats]]()
        for role in self._seats:
            if role != "actor" and role in planned.prefill:
                rolled.append((role, self._prefilled(role, planned.prefill[role])))
        for role, seconds in rolled:
            for (kinds, replicas), own in zip(self._seats[role], seconds, strict=True):
                scored[kinds] += own.sum(axis=1)[replicas]
                drains[kinds] = np.maximum(drains[kinds], self._drain(seconds)[replicas])
        if planned.steps:  # of the actor's ranks, only what they do is wanted
            rolled = [(role, seconds) for role, seconds in rolled if role not in self._decoders]
        if all(len(seconds) == 1 for _, seconds in rolled):  # without stages, turns do not matter
            rolled = [(role, seconds.sum(axis=2, keepdims=True)) for role, seconds in rolled]
        for nth in range(max((seconds.shape[2] for _, seconds in rolled), default=0)):
            for role, seconds in rolled:
                if nth < seconds.shape[2]:
                    self._pass_through(role, seconds[:, :, nth], ends)
        return drains

    def _pass_through(self, role: str, seconds: Floats, ends: Floats) -> None:
        """One micro-batch of each replica, [P, R], goes through the stages: `ends` [K] move on."""
        ready = np.full(seconds.shape[1], -np.inf)
        for (kinds, replicas), own in zip(self._seats[role], seconds, strict=True):
            np.maximum.at(ready, replicas, ends[kinds])
            ready += own
            there = own[replicas] > 0
            ends[kinds[there]] = ready[replicas[there]]
            ready += self.costs.message_s

    def _decode(
        self,
        done: Recorded[LapRound],
        clocks: Floats,
        ends: Floats,
        scoring: tuple[Floats, Floats],
        walked: _Walked,
    ) -> None:
        """Decoding beside `scoring` (its seconds and its drains, [K]): `ends` [K] of the actor's kinds are set."""
        seats, size = self._seats["actor"], len(self.planner.actor)
        busy, drain, begun, known = np.zeros(size), np.zeros(size), np.full(size, -np.inf), np.zeros(size)
        known_ends = np.zeros_like(clocks)
        known_ends[walked.kinds] = walked.ends
        for kinds, replicas in seats:
            for mine, theirs in ((busy, scoring[0]), (drain, scoring[1]), (begun, clocks), (known, known_ends)):
                np.maximum.at(mine, replicas, theirs[kinds])
        own, beside = self._decoded(done, busy, drain)
        place = int(known.argmax())
        seen = known[place] - begun[place]
        if beside is None:
            seconds = own * (seen / own[place] if len(walked.kinds) and own[place] > 0 else 1.0)
        else:
            share = min(1.0, max(0.0, (seen - own[place]) / beside[place])) if beside[place] > 0 else 1.0
            seconds = np.maximum(own + share * beside, beside)
        for kinds, replicas in seats:
            ends[kinds] = (begun + seconds)[replicas]

    def _prefilled(self, role: str, work: Ints) -> Floats:
        """Seconds of each micro-batch of a role by stage, [P, R, B]; 0 where there is none."""
        (tokens, outputs), costs = work, self.costs
        lines = [costs.prefill_at(role, stage) for stage in range(self.planner.site.placements[role].pp)]
        seconds = np.stack([line.fixed_s + tokens * line.per_token_s for line in lines])
        if role != "actor":
            seconds[-1] += costs.score.fixed_s + outputs * costs.score.per_token_s
        return np.where(tokens > 0, seconds, 0.0)

    def _drain(self, seconds: Floats) -> Floats:
        """Of a prefill [P, R, B], what the other stages take for the largest micro-batch, which comes first, [R]."""
        largest = seconds[:, :, 0]
        drain = largest.sum(axis=0) - largest.max(axis=0) + (len(largest) - 1) * self.costs.message_s
        return np.where(largest.any(axis=0), drain, 0.0)

    def _decoded(self, done: Recorded[LapRound], busy: Floats, drain: Floats) -> tuple[Floats, Floats | None]:
        """Seconds of the replicas that decode, [R], with their scoring (`busy`, `drain`); or without, and what that takes."""
        placement, growing, parts = self.planner.site.placements["actor"], self._growing(done), done.planned.parts
        prefills = self._prefilled("actor", done.planned.prefill["actor"])
        prefill, own_drain = prefills.max(axis=0).sum(axis=1), self._drain(prefills)
        lane = growing.homes * parts + portions(growing.homes, placement.dp, parts)
        if placement.pp == 1:
            laps = self._single(lane, growing.counts, placement.dp * parts).reshape(-1, parts).sum(axis=1)
            return busy + drain + prefill + laps, None
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


def _stages(site: Site, rank: int) -> tuple[int | None, ...]:
    """The stage that a rank has of each role."""
    found = (placement.coords(rank) for placement in site.placements.values())
    return tuple(None if coords is None else coords.stage for coords in found)


def _seats(site: Site, role: str, units: Units) -> list[tuple[Ints, Ints]]:
    """By stage of a role, the kinds of units that have it, and of which replica."""
    placement = site.placements[role]
    seats = []
    for stage in range(placement.pp):
        pairs = {(units.kind_of[rank], d) for d in range(placement.dp) for rank in placement.stage_ranks(d, stage)}
        kinds, replicas = np.array(sorted(pairs), dtype=np.int64).T
        seats.append((kinds, replicas))
    return seats


def micro_batches(grown: Ints, replicas: int, bins: Ints) -> Ints:
    """Tokens and outputs of each replica's micro-batches, [2, R, B]; 0 where there is none.  `grown` [4, n] is a book's, `bins`
    [n] say which micro-batch of its replica each sequence is in."""
    width = int(bins.max(initial=0)) + 1
    sums = [np.bincount(grown[0] * width + bins, each, replicas * width) for each in grown[1:3]]
    return np.stack(sums).astype(np.int64).reshape(2, replicas, width)


def packed_bins(grown: Ints, replicas: int, budget: int) -> Ints:
    """Of each sequence of `grown` [4, n] the micro-batch of at most `budget` tokens that it is packed into, [n].

    What continues a fork comes behind what it forks, in micro-batches of its own.
    """
    (homes, tokens, *_), late = grown, grown[3]
    bins = np.zeros(len(homes), dtype=np.int64)
    for part in np.flatnonzero(late == 0), np.flatnonzero(late):
        bins[part] = _bins(homes[part], tokens[part], replicas, budget)
    if late.any():
        bins += late * (int(bins[late == 0].max(initial=0)) + 1)
    return bins


def _bins(homes: Ints, tokens: Ints, replicas: int, budget: int) -> Ints:
    """Of each sequence the number of its micro-batch, as by `packed_in_order`.

    Of many replicas all are packed at once: first the longest, then the n-th of the others of each in turn.
    """
    bins, crowded = np.zeros(len(homes), dtype=np.int64), np.bincount(homes, tokens, replicas) > budget
    inside = np.flatnonzero(crowded[homes])
    number = np.bincount(homes[inside], minlength=replicas)[crowded]
    most = int(number.max(initial=0))
    if len(number) * MANY < most:
        for replica in np.flatnonzero(crowded).tolist():
            mine = np.flatnonzero(homes == replica)
            order, ends = packed_in_order(tokens[mine], budget)
            bins[mine[order]] = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        return bins
    order, firsts = inside[np.lexsort((-tokens[inside], homes[inside]))], np.cumsum(number) - number
    rows, every = np.repeat(np.arange(len(number)), number), np.arange(len(number))
    lengths, nth = np.minimum(tokens[order], budget), np.arange(len(order)) - firsts[rows]  # a longer one fills its own
    longest = lengths[firsts]
    alike, each = lengths == longest[rows], budget // longest
    count = np.bincount(rows[alike], minlength=len(number))  # of one length, and so packed at once
    found = nth // each[rows]
    total = int(np.bincount(homes[inside], tokens[inside]).max(initial=0))
    filled = np.clip(count[:, None] - np.arange(2 * total // budget + 2) * each[:, None], 0, each[:, None])
    rooms, rest, nth = budget - longest[:, None] * filled, np.flatnonzero(~alike), nth - count[rows]
    table = np.zeros((int((number - count).max(initial=0)), len(number)), dtype=np.int64)
    table[nth[rest], rows[rest]] = lengths[rest]
    for place, length in enumerate(table.copy()):
        table[place] = (rooms >= length[:, None]).argmax(axis=1)
        rooms[every, table[place]] -= length
    found[rest] = table[nth[rest], rows[rest]]
    bins[order] = found
    return bins


def portions(homes: Ints, replicas: int, parts: int) -> Ints:
    """The micro-batch of each sequence: those of a replica, in order, in runs that differ by one at most, longer ones first."""
    place = ordinal(homes)
    short, longer = np.divmod(np.bincount(homes, minlength=replicas), parts)
    short, longer = short[homes], longer[homes]
    ahead = longer * (short + 1)
    found: Ints = np.where(place < ahead, place // (short + 1), longer + (place - ahead) // np.maximum(1, short))
    return found
