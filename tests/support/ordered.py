"""The oracle of runs in virtual time: every rank carries out its planned list of actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.trace import Span as TraceSpan
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.timeline import Running, Span, Timeline, simulate
from oppo_megatron.schedule.planning.planner import PlannedRound
from oppo_megatron.sim.runs.loop import Growing, Recorded
from oppo_megatron.sim.runs.player import Floats, Played, Player
from oppo_megatron.sim.runs.virtual import VirtualRun

SCORING = (Op.PREFILL, Op.SCORE)

Lanes = list[list[Ints]]
"""By replica and decode micro-batch, the tokens that each of its sequences gets, ascending."""


class Ordered(Player):
    single_ranks = True

    def plan(
        self, index: int, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None
    ) -> PlannedRound:
        return self.planner.plan(index, active, score, chunk, list, readable)

    def play(self, done: Recorded, begun: Floats) -> Played:
        ranks, planned = self.units.first.tolist(), done.planned
        starts = dict(zip(ranks, (begun + self.round_s).tolist(), strict=True))
        running, schedule = None, planned.schedule
        if done.grown is not None:
            lanes = self._lanes(done, done.grown)
            running, schedule = _running(lanes), self._live(schedule, lanes)
        timeline = simulate(schedule, planned.round, self.planner.site, self.costs, begun=starts, running=running)
        assert not timeline.stuck, "the planner has checked it"
        ends = [own[-1].end_s if (own := timeline.spans[rank]) else starts[rank] for rank in ranks]
        scored, waited = (np.array([of(timeline, rank) for rank in ranks]) for of in (_scored_s, _waited_s))
        arrived = None if done.chunk is None else ends[self.units.source]
        return Played(np.array(ends), scored, waited, arrived, lambda: _spans(timeline, done.step))

    def _lanes(self, done: Recorded, grown: Growing) -> Lanes:
        """A sequence that ends leaves its micro-batch; a single replica stops when the batch is complete."""
        by_id = dict(zip(grown.columns.seq_ids.tolist(), self.tokens(done).tolist(), strict=True))
        return [[np.sort([by_id[g.seq_id] for g in batch]) for batch in replica] for replica in done.planned.round.decode]

    def _live(self, schedule: Schedule, lanes: Lanes) -> Schedule:
        """Leaves out void micro-steps and their messages, which all ranks of a replica skip."""
        ended = [[int(lane[-1]) for lane in replica] for replica in lanes]
        placement, actions = self.planner.site.placements["actor"], dict(schedule.actions)
        for rank in placement.ranks:
            coords = placement.coords(rank)
            assert coords is not None
            last = ended[coords.replica]
            actions[rank] = tuple(a for a in schedule.of(rank) if a.step is None or a.step < last[a.micro_batch])
        return Schedule(actions)


def _running(lanes: Lanes) -> Running:
    def running(action: Action, replica: int) -> int:
        lane = lanes[replica][action.micro_batch]
        assert action.step is not None
        return len(lane) - int(np.searchsorted(lane, action.step, side="right"))

    return running


def _spans(timeline: Timeline, step: int) -> Iterator[TraceSpan]:
    for rank, spans in timeline.spans.items():
        kinds = ((_kind(span), span) for span in spans if span.end_s > span.start_s)
        for (role, name), own in groupby(kinds, key=itemgetter(0)):
            stretch = [span for _, span in own]
            yield TraceSpan(rank, role, name, step, stretch[0].start_s, stretch[-1].end_s)


def _kind(span: Span) -> tuple[str, str]:
    action = span.action
    if action.op in SCORING and action.role != "actor":
        return action.role, "score"
    if action.op is Op.RECV:
        chunk = action.payload is Payload.CHUNK
        return ("scorer", "wait_tokens") if chunk else (action.role, "wait")
    return "actor", "decode"


def _scored_s(timeline: Timeline, rank: int) -> float:
    own = (span for span in timeline.spans[rank] if span.action.op in SCORING and span.action.role != "actor")
    return sum(span.end_s - span.start_s for span in own)


def _waited_s(timeline: Timeline, rank: int) -> float:
    """Wait of a rank without the actor for the chunk, the last thing in its list that can make it wait."""
    own = timeline.spans[rank]
    return sum(s.end_s - s.start_s for s in own if s.action.payload is Payload.CHUNK and s.action.op is Op.RECV)


class OrderedRun(VirtualRun):
    player = Ordered
