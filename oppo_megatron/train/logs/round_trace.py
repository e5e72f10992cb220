"""Reports the executor's actions to the trace, to the step's totals and to the cost model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from oppo_megatron.rundir.trace import Span, SpanRecorder
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.planning.planner import PlannedRound
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import CostMeter

WAIT, WAIT_TOKENS, DECODE, SCORE = "wait", "wait_tokens", "decode", "score"
SHORTEST_WAIT_S = 0.5e-3


class RoundTracer:
    """The executor's observer on one rank.

    Totals of a step are kept by (role, label): `decode`, `score`, `wait` (for a message of the pipeline), `wait_tokens`
    (for a chunk).  The trace gets a span for each stretch of actions with the same role and label; with `actions` a span
    for every action, named as in the schedule, and the schedules themselves go to `schedules`.
    """

    def __init__(self, spans: SpanRecorder, meter: CostMeter, site: Site, *, actions: bool, schedules: Path | None):
        self.spans, self.meter, self._actions, self._schedules = spans, meter, actions, schedules
        self._coords_by_role = {
            role: coords for role, placement in site.placements.items() if (coords := placement.coords(spans.rank))
        }
        self._step, self._round = 0, 0
        self._stretch: Span | None = None

    def begin(self, step: int) -> None:
        """What follows belongs to PPO step `step`."""
        self.flush()
        self._step = step

    def planned(self, planned: PlannedRound) -> None:
        """The next round's schedule."""
        self._round = planned.round.index
        if self._schedules is not None:
            text = planned.schedule.shifted(self._round - 1).text()
            with self._schedules.open("a", encoding="utf-8") as file:
                file.write(f"# round {self._round}, step {self._step}\n{text}")

    def __call__(self, action: Action, start: float, end: float, num_tokens: int) -> None:
        """One executed action."""
        label = _label(action)
        role = action.role if label != WAIT_TOKENS else "scorer"
        span = Span(self.spans.rank, role, label, self._step, start, end)
        self.spans.count(span)
        if num_tokens:
            self.meter.add(action.op, action.role, self._coords_by_role[action.role].stage, num_tokens, end - start)
        if self._actions:
            name = str(replace(action, chunk=action.chunk + self._round - 1))
            self.spans.write(Span(self.spans.rank, action.role, name, self._step, start, end))
        elif label != WAIT or end - start >= SHORTEST_WAIT_S:
            self._extend(span)

    def flush(self) -> None:
        """Write the stretch under way."""
        if self._stretch is not None:
            self.spans.write(self._stretch)
            self._stretch = None

    def _extend(self, span: Span) -> None:
        before = self._stretch
        if before is not None and (before.role, before.name, before.step) == (span.role, span.name, span.step):
            self._stretch = Span(span.rank, span.role, span.name, span.step, before.start, span.end)
        else:
            self.flush()
            self._stretch = span


def _label(action: Action) -> str:
    if action.op is Op.RECV:
        return WAIT_TOKENS if action.payload is Payload.CHUNK else WAIT
    return DECODE if action.role == "actor" else SCORE
