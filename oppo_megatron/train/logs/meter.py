"""Measures one rank's steps from phases that the loop reports.  Nothing here affects training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from oppo_megatron.algorithms.experience import Experience, ScoredBatch
from oppo_megatron.chunks import Chunk
from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.control.chunk_tuner import DecodeLaw, Occupancy, StepCost
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.trace import Span, SpanRecorder
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.plan import scoring_delay
from oppo_megatron.schedule.planning.planner import PlannedRound
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import CostMeter
from oppo_megatron.train.logs.journal import LATER_FACTS, Journal, StepFacts
from oppo_megatron.train.memory_meter import MemoryMeter
from oppo_megatron.train.score_exchange import ScoreReport

WAIT, WAIT_TOKENS, DECODE, SCORE = "wait", "wait_tokens", "decode", "score"
SHORTEST_WAIT_S = 0.5e-3


class RoundTracer:
    """The executor's observer on one rank.

    Step totals by (role, label): `decode`, `score`, `wait` (pipeline), `wait_tokens` (chunk).  The trace gets a span per stretch
    of equal actions (`actions`: per action).
    """

    def __init__(self, spans: SpanRecorder, meter: CostMeter, site: Site, *, actions: bool, schedules: Path | None):
        self.spans, self.meter, self._actions, self._schedules = spans, meter, actions, schedules
        self._coords_by_role = {role: coords for role, each in site.placements.items() if (coords := each.coords(spans.rank))}
        self._step, self._round = 0, 0
        self._stretch: Span | None = None

    def begin(self, step: int) -> None:
        self.flush()
        self._step = step

    def planned(self, planned: PlannedRound) -> None:
        self._round = planned.round.index
        if self._schedules is not None:
            text = planned.schedule.shifted(self._round - 1).text()
            with self._schedules.open("a", encoding="utf-8") as file:
                file.write(f"# round {self._round}, step {self._step}\n{text}")

    def __call__(self, action: Action, start: float, end: float, num_tokens: int) -> None:
        if action.op is Op.RECV:
            label = WAIT_TOKENS if action.payload is Payload.CHUNK else WAIT
        else:
            label = DECODE if action.role == "actor" else SCORE
        role = action.role if label != WAIT_TOKENS else "scorer"
        span = Span(self.spans.rank, role, label, self._step, start, end)
        self.spans.count(span)
        if num_tokens:
            self.meter.add(action.op, action.role, self._coords_by_role[action.role].stage, num_tokens, end - start)
        if self._actions:
            name = str(replace(action, chunk=action.chunk + self._round - 1))
            self.spans.write(Span(self.spans.rank, action.role, name, self._step, start, end))
        elif label != WAIT or end - start >= SHORTEST_WAIT_S:
            before = self._stretch
            if before is not None and (before.role, before.name, before.step) == (role, label, self._step):
                self._stretch = Span(self.spans.rank, role, label, self._step, before.start, end)
            else:
                self.flush()
                self._stretch = span

    def flush(self) -> None:
        if self._stretch is not None:
            self.spans.write(self._stretch)
            self._stretch = None


@dataclass
class RolloutPhase:
    """A step's rollout phase, which a checkpoint may interrupt: began at clock `begun`, `spent_s` so far."""

    facts: StepFacts
    occupancy: Occupancy
    begun: int
    spent_s: float = 0.0
    law: DecodeLaw = field(default_factory=DecodeLaw)  # of the rounds since the last interruption

    def state_dict(self) -> dict[str, Any]:
        facts = {name: value for name, value in asdict(self.facts).items() if name not in LATER_FACTS}
        return {"facts": facts, "occupancy": self.occupancy.state_dict(), "begun": self.begun, "spent_s": self.spent_s}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RolloutPhase:
        occupancy = Occupancy.from_state(state["occupancy"])
        return cls(StepFacts(**state["facts"]), occupancy, state["begun"], state["spent_s"])


@dataclass
class StepClock:
    """One rank's rounds of a step, in seconds since all met for the previous scores.

    `ends`: of decoding rounds.  `work`: before the first round (with the critic's update), then per round, without waits for
    chunks.
    """

    now: Callable[[], float] = time.monotonic
    met: float = 0.0
    ends: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    _last: float = 0.0
    _waited: float = 0.0

    def meet(self) -> None:
        self.met = self.now()

    def begin(self) -> None:
        self._last, self._waited, self.ends = self.now(), 0.0, []
        self.work = [self._last - self.met]

    def round(self, waited_s: float, *, decoded: bool) -> None:
        """`waited_s`: waited for chunks in this step so far."""
        now = self.now()
        self.work.append(now - self._last - (waited_s - self._waited))
        self._last, self._waited = now, waited_s
        if decoded:
            self.ends.append(now - self.met)


@dataclass
class StepMeter:
    """`role`: "actor" or "scorer".  `journal`: on the actor's first output rank only.

    `critic`: "shared" if some rank makes both updates, "waited" if a step ends only after both, else "apart"; None unless
    trained.  `completed` counts steps with a complete line, on every rank.
    """

    world: World
    rounds: RoundRunner
    spans: SpanRecorder
    tracer: RoundTracer
    memory: MemoryMeter
    journal: Journal | None
    role: str
    critic: Literal["shared", "waited", "apart"] | None
    clock: StepClock = field(default_factory=StepClock)
    completed: int = 0
    _started: float = 0.0
    _before_s: float = 0.0  # what the step took before an interruption
    _planned_s: float = 0.0
    _prefills: tuple[int, int] = (0, 0)
    _phase: RolloutPhase | None = None

    @property
    def phase(self) -> RolloutPhase:
        assert self._phase is not None, "no step has begun"
        return self._phase

    @property
    def facts(self) -> StepFacts:
        return self.phase.facts

    def begin(self, phase: RolloutPhase) -> None:
        if self._phase is not None:
            self._phase.spent_s = self._elapsed_s()
        self._started = time.monotonic()
        self._phase, self._before_s, self._planned_s = phase, phase.spent_s, self.rounds.planning_s
        self._prefills = self._planned_prefills()
        self.clock.begin()
        self.tracer.begin(phase.facts.step)

    @contextlib.contextmanager
    def part(self, name: str, role: str | None = None) -> Iterator[None]:
        """Measure part of a step: a trace span, and the activity shown if a peer waits."""
        role, step = role or self.role, self.facts.step
        waits = waiting_for(f"{name} {role}, step {step}", self.world.activity, waits=False)
        with self.spans.span(name, role=role, step=step), waits:
            yield

    def decoded(self, chunk: Chunk, begun_at: int, backfilled: int, round_s: float) -> None:
        """Count a round of `round_s` seconds; the decode clock was `begun_at` before it."""
        facts, phase, tokens = self.facts, self.phase, chunk.rows.num_tokens
        self.end_round(decoded=True)
        phase.occupancy.record(chunk, begun_at)
        facts.backfilled += backfilled
        facts.tokens += tokens
        facts.decode_s += round_s
        facts.decode_steps, facts.tail_waste = phase.occupancy.num_steps, phase.occupancy.tail_waste
        if begun_at > phase.begun:  # the first round reads the step's prompts, too
            phase.law.add(chunk.clock - begun_at, tokens, round_s)
        phase.spent_s = self._elapsed_s()

    def scoring_seconds(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for role in ("scorer", *self.rounds.scoring):
            for name, seconds in self.spans.totals(self.facts.step, role).items():
                totals[name] = totals.get(name, 0.0) + seconds
        self.facts.local_score_s = totals.get("score", 0.0)
        return totals

    def all_memory(self) -> None:
        with self.world.activity.doing("memory of all ranks", waits=True):
            self.memory.of_all_ranks()

    def scored(self, scored: ScoredBatch, report: ScoreReport, kl_coefficient: float) -> None:
        self.clock.meet()
        facts = self.facts
        facts.scores, facts.kl_coefficient = report, kl_coefficient
        rewards, num_rows = scored.all_scores.tolist(), scored.scores_B.numel()
        facts.rewards, facts.greedy_rewards = rewards[:num_rows], rewards[num_rows:]
        if self.journal is not None and self.completed < facts.step - 1:
            if self.critic == "apart":
                delay_s = scoring_delay(report.critic["critic_update_s"], report.work, self.clock.ends)
                facts.critic_exposed_s = min(delay_s, self.spans.totals(facts.step, "actor")["wait_scores"])
        self.complete(facts.step - 1, report.critic)

    def measured(self) -> list[float]:
        """Seconds of the step so far, without the update already made, then the sums of its decode law."""
        update_s = self.spans.totals(self.facts.step, "actor").get("update", 0.0)
        return [self._elapsed_s() - update_s, *self.phase.law.sums]

    def cost(self) -> StepCost:
        assert self.facts.scores is not None
        seconds, *sums = self.facts.scores.measured
        return StepCost(seconds, self.facts.decode_steps, self.facts.tokens, DecodeLaw(sums))

    def end(self, batch: Sequence[Rollout], carried: Sequence[Rollout], experience: Experience) -> None:
        facts = self.facts
        facts.planning_s += self.rounds.planning_s - self._planned_s
        facts.step_s = self._elapsed_s()
        if self.journal is not None:
            self.journal.step(facts, batch, carried, experience, self.spans)
        self.spans.flush()

    def complete(self, step: int, critic_stats: dict[str, float]) -> None:
        """Complete the metrics line of `step` with the critic's statistics, unless that was done before."""
        late: dict[str, Any] = critic_stats | self.memory.by_rank.peak_fields()
        if self.journal is not None and self.completed < step:
            if self.critic is not None:
                update_s = late["critic_update_s"]
                waited_s = self.spans.totals(step, "actor").get("wait_update", 0.0)
                if self.facts.step > step:
                    waited_s += self.facts.critic_exposed_s
                exposed_s = update_s if self.critic == "shared" else min(update_s, waited_s)
                late |= {"critic_exposed_s": exposed_s, "critic_hidden_s": update_s - exposed_s}
            self.journal.complete(step, late)
        self.completed = step

    def end_round(self, *, decoded: bool) -> None:
        waited_s = self.spans.totals(self.facts.step, "scorer").get("wait_tokens", 0.0)
        self.clock.round(waited_s, decoded=decoded)
        before, self._prefills = self._prefills, self._planned_prefills()
        self.facts.prefilled_tokens += self._prefills[0] - before[0]
        self.facts.forked_tokens += self._prefills[1] - before[1]

    def _planned_prefills(self) -> tuple[int, int]:
        return self.rounds.planner.prefilled_tokens, self.rounds.planner.forked_tokens

    def _elapsed_s(self) -> float:
        return self._before_s + time.monotonic() - self._started
