"""Rounds by laps: a replica's pipeline is the formula of its lap, and nothing is ordered action by action.

Legend: R replicas of a role, U units, P stages, M decode micro-batches of a replica.  With w_p the seconds of stage p for one
micro-batch (its sample on the last) and h those of a message:

    lap      L = max(sum over M of max w_p, w_0 + ... + w_(P-1) + P h)     a decode step of all micro-batches
    prefill  m max t_p + (t_0 + ... + t_(P-1) - max t_p + (P - 1) h)       m micro-batches of t_p seconds each

A lap is of the sequences that still run in it: one that has ended leaves its micro-batch, and a micro-batch without any costs
nothing.  Roles on the same ranks follow each other, but for what woven rounds hide in the gaps of the laps (`predict_s`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.planning.book import Book
from oppo_megatron.schedule.planning.ledger import ordinal
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.weaving.costs import Costs, at_stage
from oppo_megatron.schedule.weaving.cut import Cut, Work, predict_s
from oppo_megatron.sim.runs.loop import Recorded
from oppo_megatron.sim.runs.played import Floats, Piece, Played
from oppo_megatron.sim.runs.units import NONE, Units


@dataclass(frozen=True)
class LapRound:
    """A round's work: `prefill` by role is [3, R]: tokens, sequences, outputs; `homes` are the replicas of those that decode."""

    steps: int
    cut: Cut
    prefill: Mapping[str, Ints]


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

    def plan(
        self, index: int, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None
    ) -> LapRound:
        """The books advance; what they add is the round's work."""
        before = {role: book.prefilled.copy() for role, book in self.books.items()}
        booked = self.planner.book(active, score, chunk, list, readable)
        return LapRound(
            booked.steps, booked.cut, {role: book.prefilled - before[role] for role, book in self.books.items()}
        )

    def play(self, done: Recorded[LapRound], begun: Floats) -> Played:
        busy, drain = self._scored(done.planned)
        starts = begun + self.round_s
        if done.chunk is None:
            ends = starts + busy + drain
            return Played(ends, busy, np.zeros_like(begun), None, lambda: self._pieces(starts, ends, ends, busy))
        holds = self.units.holds("actor")
        ends = starts + busy + drain
        ends[holds] = starts[holds] + self._decoded(done, busy[holds], drain[holds])
        arrived = float(ends[holds].max())
        if self.planner.site.placements["actor"].dp > 1:
            arrived += self.costs.message_s
        due = np.where(holds, arrived, arrived + self.units.hops * self.costs.message_s)
        waited = np.where(holds, 0.0, np.maximum(0.0, due - ends))
        own = ends.copy()
        return Played(np.maximum(ends, due), busy, waited, arrived, lambda: self._pieces(starts, own, due, busy))

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

    def _scored(self, planned: LapRound) -> tuple[Floats, Floats]:
        """Seconds of scoring, [U]: the roles of a unit follow each other, and the longest drain comes behind the last."""
        steady, drain = np.zeros(len(self.units)), np.zeros(len(self.units))
        for role, replicas in self.units.replicas.items():
            if role == "actor" or not planned.prefill[role].any():
                continue
            own_steady, own_drain = self._prefilled(role, planned.prefill[role], planned.cut.prefill_tokens)
            held = replicas != NONE
            steady[held] += own_steady[replicas[held]]
            drain[held] = np.maximum(drain[held], own_drain[replicas[held]])
        return steady, drain

    def _prefilled(self, role: str, work: Ints, budget: int) -> tuple[Floats, Floats]:
        """Seconds of a role's prefill by replica, [R]: while its slowest stage works, and what drains behind it."""
        tokens, sequences, outputs = work
        count = micro_batches(tokens, sequences, budget)
        each, share = tokens / np.maximum(count, 1), np.minimum(1.0, budget / np.maximum(1, tokens))
        seconds = self._stages(role, each, outputs / np.maximum(count, 1))
        largest = self._stages(role, share * tokens, share * outputs)  # the first bins are filled first
        drain = largest.sum(axis=0) - largest.max(axis=0) + (len(largest) - 1) * self.costs.message_s
        return count * seconds.max(axis=0), np.where(count > 0, drain, 0.0)

    def _stages(self, role: str, tokens: Floats, outputs: Floats) -> Floats:
        """Seconds of a prefill micro-batch, [P, R]."""
        lines = [self.costs.prefill_at(role, stage) for stage in range(self.planner.site.placements[role].pp)]
        seconds = np.stack([line.fixed_s + tokens * line.per_token_s for line in lines])
        if role != "actor":
            seconds[-1] += self.costs.score.fixed_s + outputs * self.costs.score.per_token_s
        return seconds

    def _decoded(self, done: Recorded[LapRound], busy: Floats, drain: Floats) -> Floats:
        """Seconds of the units that decode, for their scoring (`busy`, `drain`), their prefills and their laps."""
        placement, replicas = self.planner.site.placements["actor"], self.units.replicas["actor"]
        replicas, growing = replicas[replicas != NONE], self._growing(done)
        parts = done.planned.cut.micro_batches
        prefill, own_drain = self._prefilled("actor", done.planned.prefill["actor"], self.planner.micro_batch_tokens)
        lane = growing.homes * parts + portions(growing.homes, placement.dp, parts)
        if placement.pp == 1:
            laps = self._single(lane, growing.counts, placement.dp * parts).reshape(-1, parts).sum(axis=1)
            seconds: Floats = busy + drain + (prefill + laps)[replicas]
            return seconds
        laps, fill = self._pipelined(lane, growing.counts, (placement.dp, parts), placement.pp)
        if self.planner.generator == "woven":
            own = (prefill + own_drain + laps - np.minimum(own_drain, fill))[replicas]
            seconds = own + self._beside(done.planned, growing, busy + drain, own)
            return seconds
        behind = np.maximum(drain, own_drain[replicas])  # all of it is one pipeline, which drains once before the laps
        seconds = busy + prefill[replicas] + behind + laps[replicas] - np.minimum(behind, fill[replicas])
        return seconds

    def _growing(self, done: Recorded[LapRound]) -> _Growing:
        """A single replica knows when the batch is complete; several go on to the end of the chunk, and are cut there."""
        assert done.grown is not None and done.chunk is not None
        counts = done.grown.counts
        if self.planner.site.placements["actor"].dp == 1:
            counts = np.minimum(counts, done.chunk.clock - done.begun)
        return _Growing(self.planner.actor.homes(done.grown.columns), counts)

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

    def _beside(self, planned: LapRound, growing: _Growing, scored: Floats, decoded: Floats) -> Floats:
        """What scoring adds to decoding where it is woven: as much of it as for the replica that has most to do."""
        if not scored.any():
            return scored
        units, placement = self.units, self.planner.site.placements["actor"]
        place = int((scored + decoded).argmax())
        unit = int(np.flatnonzero(units.holds("actor"))[place])
        mine = growing.counts[growing.homes == units.replicas["actor"][unit]]
        tokens = {
            role: int(planned.prefill[role][0, replicas[unit]])
            for role, replicas in units.replicas.items()
            if role != "actor" and replicas[unit] != NONE
        }
        steps = int(mine.max(initial=0))
        alone = Work(len(mine), steps, placement.pp, {})  # as the round was planned: what gaps hold does not change in it
        both_s, alone_s = (predict_s(work, planned.cut, self.costs) for work in (replace(alone, prefill_tokens=tokens), alone))
        share = (both_s - alone_s) / scored[place]
        beside: Floats = np.maximum(scored * min(1.0, max(0.0, share)), scored - decoded)
        return beside


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
