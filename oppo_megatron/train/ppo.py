"""The PPO loop.  Plain PPO and every overlap are this loop under different plans and schedules (`schedule/`).

Every rank runs it.  Prompts, buffer, books and controllers are the same on all ranks and advance by what the chunks say, so
no rank asks another what to do next.  A step is a number of rounds, then the update:

    ranks of the actor      decode a chunk, send it, go on; at the step's end begin the actor's update, wait for the scores
                            where the update first needs them, complete it
    ranks of the scorers    prefill the chunk before on reward, reference and critic; at the step's end send the scores,
                            update the critic, while the actor may already decode the next step

A rank that has both does both, as the round's schedule says.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.algorithms.experience import Experience, ScoredBatch
from oppo_megatron.cluster.peers import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk import ChunkTuner, DecodeLaw, StepCost
from oppo_megatron.control.guards import Breach
from oppo_megatron.control.kl import KLController
from oppo_megatron.control.signals import Occupancy, length_gap
from oppo_megatron.engine.rounds import Decoding, RoundRunner
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import Rollout, StepSignals
from oppo_megatron.rundir.trace import SpanRecorder
from oppo_megatron.schedule.plan import StepPlan, plan_step
from oppo_megatron.schedule.weaving.costs import CostMeter, Costs
from oppo_megatron.train.actor import Actor
from oppo_megatron.train.critic import Critic, no_stats
from oppo_megatron.train.critical_path import CriticPlacement, StepClock, scoring_delay
from oppo_megatron.train.evaluate import Evaluator
from oppo_megatron.train.guards.guard import Evidence, Guard
from oppo_megatron.train.logs.journal import Journal, StepFacts
from oppo_megatron.train.logs.round_trace import RoundTracer
from oppo_megatron.train.memory import MemoryByRank, MemoryMeter
from oppo_megatron.train.saving.phase import RolloutPhase
from oppo_megatron.train.saving.saver import Saver
from oppo_megatron.train.score_exchange import ScoreExchange, ScoreReport, sum_over_ranks
from oppo_megatron.train.update import UpdateSettings

COSTS_KEPT = 0.5
"""How much what was measured before a step counts against what the step measured."""


@dataclass
class PPOTrainer:
    """One rank's view of the run.  `actor` and `critic` are None where the rank has no part in them."""

    config: TrainConfig
    world: World
    scheduler: OvercommitScheduler
    rounds: RoundRunner
    exchange: ScoreExchange
    chunk_tuner: ChunkTuner
    kl: KLController
    spans: SpanRecorder
    tracer: RoundTracer
    memory: MemoryMeter
    actor: Actor | None
    critic: Critic | None
    evaluator: Evaluator | None
    guard: Guard
    journal: Journal | None  # on the actor's first output rank
    saver: Saver
    clock: StepClock = field(default_factory=StepClock)
    done: int = 0  # steps
    settled: int = 0  # steps whose critic update has ended, as every rank knows
    phase: RolloutPhase | None = None  # of the step under way

    def run(self) -> bool:
        """Train until the prompts end and every rollout has been trained; False: told to stop, and saved."""
        if self.done == 0 and self.phase is None:
            self._evaluate(0, last=False)
        while not self.over:
            step = self.done + 1
            with self.world.activity.doing(f"step {step}"):
                complete = self._step(step)
            if not complete:
                self.saver.save(self)
                return False
            self._evaluate(self.done, last=self.over)
            if self.saver.due(self.done):
                self.saver.save(self)
                if self.saver.stopping and not self.over:
                    return False
        self.settle()
        self.spans.flush()
        self.saver.conclude()
        if self.journal is not None:
            self.journal.end(None if self.evaluator is None else self.evaluator.describe_end())
        return True

    @property
    def over(self) -> bool:
        """Nothing is left to train; a run that was resumed with fewer steps, or ends early, may have rollouts left."""
        stopped = self.evaluator is not None and self.evaluator.over
        return self.scheduler.done or self.done == self.config.steps or stopped

    def settle(self) -> None:
        """Every rank meets: the critic's last update has ended, and the last step's line is whole."""
        if self.settled == self.done:
            return
        with self._part("wait_update", "actor" if self.actor is not None else "scorer", self.done):
            critic_stats, memory = self.exchange.critic_stats(self.critic), self._memory()
        if self.journal is not None:
            self._complete(self.done, critic_stats | memory.peak_fields())
        self.settled = self.done

    def _step(self, step: int) -> bool:
        """The step, or what is left of it; False where the run is to stop within it."""
        started = time.monotonic()
        self.clock.begin()
        self.tracer.begin(step)
        plan = plan_step(self.config)
        planned_s = self.rounds.planning_s
        phase = self.phase = self.phase or self._begin(step)
        facts, before_s = phase.facts, phase.spent_s
        complete = self._rollout(plan, phase)
        phase.spent_s = before_s + time.monotonic() - started
        if not complete:
            return False
        self.phase = None
        with facts.planning():
            batch = self.scheduler.take_batch()
        scored = self._score(step, batch, plan, facts)
        scored_s = before_s + time.monotonic() - started - self._updating_s(step)
        experience = self._train(batch, scored, plan, facts)
        self._observe(facts, StepCost(scored_s, facts.decode_steps, facts.tokens_decoded, phase.law))
        facts.planning_s += self.rounds.planning_s - planned_s
        facts.step_s = time.monotonic() - started + before_s
        if self.journal is not None:
            self.journal.step(facts, batch, self.scheduler.buffer.rollouts, experience, self.spans)
        self.spans.flush()
        self.done = step
        return True

    def _begin(self, step: int) -> RolloutPhase:
        """Admit the step's prompts."""
        facts = StepFacts(step, delta=self.scheduler.buffer.delta, chunk_tokens=self.chunk_tuner.value)
        facts.checkpoint_s, facts.checkpoint_bytes, facts.checkpoint_hidden_s = self.saver.take_cost()
        if self.actor is not None:
            facts.version = self.actor.version
        clock = self.scheduler.buffer.clock
        with facts.planning():
            self.rounds.admit(self.scheduler.begin_step())
        return RolloutPhase(facts, Occupancy(clock), clock)

    def _rollout(self, plan: StepPlan, phase: RolloutPhase) -> bool:
        """Decode until the batch is complete, the scorers beside it if the plan says so; False: told to stop before."""
        buffer, facts = self.scheduler.buffer, phase.facts
        while not buffer.readiness().ready:
            started = time.monotonic()
            with facts.planning():
                backfilled = self.scheduler.backfill()
                self.rounds.admit(backfilled)
                active, score = buffer.active, buffer.rollouts if plan.stream else []
                readable = buffer.worth_reading(self.config.overlap.critic_reads)
            halt = self.actor is not None and self.saver.told_to_stop(self.actor.role.serving.groups.all)
            decoding = Decoding(buffer.clock, facts.version, buffer.readiness, halt)
            chunk = self.rounds.run(active, score, self.scheduler.chunk(self.chunk_tuner.value), decoding, readable)
            assert chunk is not None
            with facts.planning():
                buffer.record(chunk)
                phase.occupancy.record(chunk)
                self.rounds.recorded(active)
            self.exchange.request(active)
            self.clock.round(self._waited_for_chunks(facts.step), decoded=True)
            facts.backfilled += len(backfilled)
            tokens, seconds = sum(len(row.tokens) for row in chunk.rows), time.monotonic() - started
            facts.tokens_decoded += tokens
            facts.decode_s += seconds
            if decoding.clock > phase.begun:  # the first round reads the step's prompts, too
                phase.law.add(chunk.clock - decoding.clock, tokens, seconds)
            if chunk.halt:
                return False
        facts.decode_steps, facts.tail_waste = buffer.clock - phase.begun, phase.occupancy.tail_waste
        return True

    def _score(self, step: int, batch: Sequence[Rollout], plan: StepPlan, facts: StepFacts) -> ScoredBatch:
        """Complete the batch's scoring, and give every rank the scores; the actor's ranks begin their update meanwhile."""
        started = time.monotonic()
        while self.rounds.owes(batch):
            buffer = self.scheduler.buffer
            self.rounds.run([], batch, self.chunk_tuner.value, Decoding(buffer.clock, facts.version, buffer.readiness))
            self.clock.round(self._waited_for_chunks(step), decoded=False)
        self.tracer.flush()
        facts.drain_s = time.monotonic() - started
        if self.actor is not None and plan.forward_ahead:
            with self._part("update", "actor", step):
                self.actor.begin(batch, UpdateSettings.of(self.config, step, self.world.device))
        waiting = "wait_scores" if self.actor is not None else "send"
        role = "actor" if self.actor is not None else "scorer"
        seconds = self._scoring_seconds(step)
        with self._part(waiting, role, step):
            scored, report = self.exchange.gather(batch, self.rounds, self.actor, self.critic, seconds, self.clock.work)
            memory = self._memory()
            self.rounds.planner.actor.most = memory.decode_most
            self.saver.meet(step, float(scored.scores_B.double().mean()))
        self.clock.meet()
        facts.scores, facts.kl_coefficient, facts.rewards = report, self.kl.value, scored.scores_B.tolist()
        facts.memory = memory.bounds()
        facts.local_score_s = seconds.get("score", 0.0)
        if self.journal is not None and self.settled < self.done:
            facts.critic_exposed_s = self._critic_delay(step, report)
            self._complete(self.done, report.critic | memory.peak_fields(), facts.critic_exposed_s)
        self.settled = self.done
        with facts.planning():
            self.rounds.retire(batch)
        return scored

    def _critic_delay(self, step: int, report: ScoreReport) -> float:
        """How much of this step's wait for scores is due to the critic's update of the step before."""
        if not self._critic_place.delays_scores:
            return 0.0
        delay_s = scoring_delay(report.critic["critic_update_s"], report.work, self.clock.ends)
        return min(delay_s, self.spans.totals(step, "actor")["wait_scores"])

    def _complete(self, step: int, late: dict[str, Any], delay_s: float = 0.0) -> None:
        """The critic's update of the step has ended; `delay_s` of it held up the next step's scores.

        `late` are the fields that are known only now: of that update, and what memory the step has left at its highest.
        """
        assert self.journal is not None
        update_s, waited_s = late["critic_update_s"], self.spans.totals(step, "actor").get("wait_update", 0.0)
        exposed_s = self._critic_place.exposed_s(update_s, waited_s + delay_s)
        self.journal.complete(step, late | {"critic_exposed_s": exposed_s, "critic_hidden_s": update_s - exposed_s})

    @property
    def _critic_place(self) -> CriticPlacement:
        placements = self.exchange.placements
        shares_ranks = not set(placements["critic"].ranks).isdisjoint(placements["actor"].ranks)
        return CriticPlacement(shares_ranks, plan_step(self.config).wait_for_critic)

    def _updating_s(self, step: int) -> float:
        """Seconds of the actor's update in the step so far."""
        return self.spans.totals(step, "actor").get("update", 0.0)

    def _waited_for_chunks(self, step: int) -> float:
        return self.spans.totals(step, "scorer").get("wait_tokens", 0.0)

    def _scoring_seconds(self, step: int) -> dict[str, float]:
        """Seconds by label that this rank spent on the scoring roles in the step so far."""
        totals: dict[str, float] = {}
        for role in ("scorer", *self.rounds.scoring):
            for name, seconds in self.spans.totals(step, role).items():
                totals[name] = totals.get(name, 0.0) + seconds
        return totals

    def _train(self, batch: Sequence[Rollout], scored: ScoredBatch, plan: StepPlan, facts: StepFacts) -> Experience:
        """Update actor and critic with the batch, or skip it where a guard finds fault.

        Raises where the run is to stop, or to go back.
        """
        experience, breach = self.guard.examine(scored, self.kl.value)
        evidence = self._evidence(facts, batch, scored, experience)
        if breach is not None:
            self._settle(breach, evidence)
            if self.actor is not None:
                self.actor.abandon()
            if self.critic is not None:
                self.critic.stats = no_stats()
        self._measure_costs(facts.step)
        if breach is None:
            breach = self._update(facts.step, batch, experience, facts)
            updates = facts.actor | ({} if self.critic is None else self.critic.stats)
            evidence = replace(evidence, figures={**evidence.figures, **updates})
            self._settle(breach, evidence)
        self._end_update(facts.step, plan, changed=breach is None)
        if breach is None:
            self._learn(facts.step, batch, experience, facts)
        else:
            facts.skipped = breach.reason
        return experience

    def _settle(self, breach: Breach | None, evidence: Evidence) -> None:
        """Raises where the run is to stop, or to go back: to the checkpoint that is being written, if there is one."""
        if breach is not None:
            self.saver.conclude()
        self.guard.settle(breach, evidence, self.scheduler.position)

    def _evidence(
        self, facts: StepFacts, batch: Sequence[Rollout], scored: ScoredBatch, experience: Experience
    ) -> Evidence:
        newest = max(version for rollout in batch for version in rollout.versions)
        version = newest if self.actor is None else facts.version
        figures = asdict(experience.stats)
        return Evidence(facts.step, version, self.kl.value, batch, scored, figures, self.exchange.refusal)

    def _update(self, step: int, batch: Sequence[Rollout], experience: Experience, facts: StepFacts) -> Breach | None:
        """Update actor and critic; where a guard finds fault, what it is, and the update taken back if it may be."""
        settings = UpdateSettings.of(self.config, step, self.world.device)
        actor, critic, guard = self.actor, self.critic, self.guard
        takes_back = guard.rules.undo_updates
        undo = [role.set_aside() for role in (actor, critic) if role is not None] if takes_back else []
        found: list[Breach | None] = []
        if actor is not None:
            coefficient = self.kl.value
            with self._part("update", "actor", step):
                facts.actor, breach = guard.watch(
                    "actor", lambda: actor.update(batch, experience, coefficient, settings)
                )
            found.append(breach)
        if critic is not None:
            with self._part("update", "critic", step):
                _, breach = guard.watch("critic", lambda: critic.update(batch, experience, settings))
            critic.stats["critic_update_s"] = self.spans.totals(step, "critic")["update"]
            found.append(breach)
        with self.world.activity.doing(f"guards, step {step}", waits=True):
            worst = guard.agree(found, step)
        if worst is not None and worst.action == "skip":
            for back in undo:
                back()
        return worst

    def _end_update(self, step: int, plan: StepPlan, changed: bool) -> None:
        """Caches of changed weights are void; the ranks meet where the next step waits for the critic."""
        if changed:
            if self.config.overlap.actor_kv == "recompute":
                self.rounds.actor_changed()
            self.rounds.critic_changed()
        self.rounds.executor.drain()
        self.memory.look()
        if plan.wait_for_critic and self.world.size > 1:
            role = "actor" if self.actor is not None else "scorer"
            with self._part("wait_update", role, step):
                dist.barrier()

    @contextlib.contextmanager
    def _part(self, name: str, role: str, step: int) -> Iterator[None]:
        """What a step does beside its rounds: a span of the trace, and named where a peer does not come."""
        waits = waiting_for(f"{name} {role}, step {step}", self.world.activity, waits=False)
        with self.spans.span(name, role=role, step=step), waits:
            yield

    def _memory(self) -> MemoryByRank:
        with self.world.activity.doing("memory of all ranks", waits=True):
            return self.memory.of_all_ranks()

    def _learn(self, step: int, batch: Sequence[Rollout], experience: Experience, facts: StepFacts) -> None:
        """The controllers of delta and KL, which have the same inputs on every rank."""
        assert facts.scores is not None
        with facts.planning():
            facts.length_gap = length_gap(batch, self.scheduler.buffer.rollouts)
            signals = StepSignals(experience.stats.score_mean, facts.tail_waste, facts.scores.ess, facts.length_gap)
            facts.delta_reason = self.scheduler.end_step(step, signals).reason
            self.kl.observe(experience.stats.kl_mean, len(batch))

    def _observe(self, facts: StepFacts, cost: StepCost) -> None:
        """The controller of the chunk size, which goes by the times of the actor's output rank."""
        if not self.config.overlap.intra or self.actor is None:
            return
        groups = self.actor.role.serving.groups
        measured = torch.tensor([cost.seconds, *cost.rounds.sums()], dtype=torch.float64, device=self.world.device)
        if groups.all.size() > 1:
            with waiting_for(f"seconds of the rollout, step {facts.step}", self.world.activity):
                dist.broadcast(measured, groups.output_rank, group=groups.all)
        seconds, *sums = measured.tolist()
        cost = replace(cost, seconds=seconds, rounds=DecodeLaw(*sums))
        facts.chunk_reason = self.chunk_tuner.observe(facts.step, cost).reason

    def _measure_costs(self, step: int) -> None:
        """What all ranks measured becomes the cost model of the next step's rounds, where they are woven by it.

        Before the update: the ranks have just met for the scores, and the actor's may later be ahead of the critic's.
        """
        planner, meter = self.rounds.planner, self.tracer.meter
        if planner.generator != "woven":
            return
        with waiting_for(f"measured costs, step {step}", self.world.activity):
            sums = sum_over_ranks(meter.to_vector(), self.world.device)
        planner.learn(CostMeter(meter.stages, sums).costs(Costs()))
        meter.forget(COSTS_KEPT)

    def _evaluate(self, step: int, last: bool) -> None:
        """Held-out metrics before the first step, after the last, and every so often."""
        if self.evaluator is None or not self.evaluator.due(step, last):
            return
        role = "actor" if self.actor is not None else "scorer"
        with (
            self.spans.span("evaluate", role=role, step=step),
            self.world.activity.doing(f"evaluation after step {step}"),
        ):
            figures = self.evaluator.measure(self, step)
        self.saver.look_at(step, figures)
        if self.journal is not None:
            self.journal.evaluation(step, figures)
