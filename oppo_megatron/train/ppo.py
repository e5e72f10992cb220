"""The PPO loop.  Plain PPO and every overlap are this loop under different plans (`schedule.plan`).

Every rank runs it.  Prompts, buffer and controllers are the same on all ranks and advance by what the chunks say, so no rank
asks another what to do next:

    actor ranks     decode a chunk, send it, go on; at the step's end wait for the scores, update the actor
    scorer ranks    wait for a chunk, prefill it on reward, reference and critic; at the step's end send the scores,
                    update the critic, while the actor already decodes the next step

In a single process the two halves take turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from oppo_megatron.algorithms.experience import Experience, build_experience
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk import ChunkTuner
from oppo_megatron.control.kl import KLController
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import Rollout
from oppo_megatron.runtime.stream import TokenStream
from oppo_megatron.runtime.world import World
from oppo_megatron.schedule.plan import StepPlan, plan_step
from oppo_megatron.train.actor import Actor
from oppo_megatron.train.evaluate import Evaluator
from oppo_megatron.train.journal import Journal, StepFacts
from oppo_megatron.train.score_exchange import ScoreExchange
from oppo_megatron.train.scorers import ScorerSide
from oppo_megatron.train.trace import SpanRecorder
from oppo_megatron.train.update import UpdateSettings


@dataclass
class PPOTrainer:
    """One rank's view of the run.  `actor` and `scorers` are None where the rank has no part in them."""

    config: TrainConfig
    world: World
    scheduler: OvercommitScheduler
    stream: TokenStream
    exchange: ScoreExchange
    chunk_tuner: ChunkTuner
    kl: KLController
    spans: SpanRecorder
    actor: Actor | None
    scorers: ScorerSide | None
    evaluator: Evaluator | None
    journal: Journal | None  # on the actor's output rank

    def run(self) -> None:
        """Train until the prompts end and every rollout has been trained."""
        self._evaluate(0, last=False)
        step = 0
        while not self.scheduler.done:
            step += 1
            self._step(step)
            self._evaluate(step, last=self.scheduler.done)
        critic_stats = self.exchange.critic_stats(self.scorers)
        if self.journal is not None:
            self.journal.complete(step, critic_stats)
        self.spans.flush()

    def _step(self, step: int) -> None:
        started = time.time()
        plan = plan_step(self.config.overlap, self.chunk_tuner.value)
        facts = StepFacts(step, delta=self.scheduler.buffer.delta, chunk_tokens=plan.round_steps)
        if self.actor is not None:
            facts.version = self.actor.version
        self.stream.admit(self.scheduler.begin_step())
        facts.tokens_decoded = self._rollout(step, plan)
        batch = self.scheduler.take_batch()
        rollout_s = time.time() - started
        experience = self._score(step, batch, facts)
        self._update(step, batch, experience, plan, facts)
        self._observe(step, batch, experience, facts, rollout_s)
        facts.step_s = time.time() - started
        if self.journal is not None:
            self.journal.step(facts, batch, self.scheduler.buffer.rollouts, experience, self.spans)
        self.spans.flush()

    def _rollout(self, step: int, plan: StepPlan) -> int:
        """Decode until the batch is complete, the scorers beside it if the plan says so.  Returns the tokens decoded."""
        buffer, tokens, index = self.scheduler.buffer, 0, 0
        if plan.stream:
            self._prefill(step, buffer.rollouts)
        while not (stop := buffer.readiness()).ready:
            if self.actor is not None:
                with self.spans.span("decode", role="actor", step=step):
                    chunk = self.actor.generator.decode_round(
                        buffer.active,
                        stop,
                        index=index,
                        max_steps=plan.round_steps or sys.maxsize,
                        clock=buffer.clock,
                        version=self.actor.version,
                    )
                if self.stream.sends:
                    self.stream.send(chunk)
            else:
                with self.spans.span("wait_tokens", role="scorer", step=step):
                    chunk = self.stream.receive()
            buffer.record(chunk)
            tokens += sum(len(row.tokens) for row in chunk.rows)
            index += 1
            if plan.stream:
                self._prefill(step, buffer.rollouts)
        return tokens

    def _prefill(self, step: int, rollouts: Sequence[Rollout]) -> None:
        if self.scorers is not None:
            with self.spans.span("score", role="scorer", step=step):
                self.scorers.advance(rollouts)

    def _score(self, step: int, batch: Sequence[Rollout], facts: StepFacts) -> Experience:
        """Complete the batch's scoring, and give every rank its experience."""
        self._prefill(step, batch)
        waiting = "wait_scores" if self.actor is not None else "send"
        with self.spans.span(waiting, role="actor" if self.actor else "scorer", step=step):
            scored, report = self.exchange.gather(batch, self.scorers, self.spans.totals(step, "scorer"))
        facts.scores, facts.kl_coefficient, facts.rewards = report, self.kl.value, scored.scores_B.tolist()
        if self.journal is not None and step > 1:
            self.journal.complete(step - 1, report.critic)
        if self.scorers is not None:
            self.scorers.forget(batch)
        self.stream.retire(batch)
        return build_experience(scored, self.config.ppo, self.kl.value)

    def _update(
        self, step: int, batch: Sequence[Rollout], experience: Experience, plan: StepPlan, facts: StepFacts
    ) -> None:
        ppo, seed = self.config.ppo, self.config.seed
        budget = self.config.runtime.micro_batch_tokens
        settings = UpdateSettings(ppo.epochs, ppo.minibatches, budget, seed, step, self.world.device)
        if self.actor is not None:
            with self.spans.span("update", role="actor", step=step):
                facts.actor = self.actor.update(batch, experience, self.kl.value, settings)
        if self.scorers is not None:
            with self.spans.span("update", role="critic", step=step):
                self.scorers.update_critic(batch, experience, settings)
            self.scorers.critic_stats["critic_update_s"] = self.spans.totals(step, "critic")["update"]
        self.stream.drain()
        if plan.wait_for_critic and self.world.size > 1:
            role = "actor" if self.actor is not None else "scorer"
            with self.spans.span("wait_update", role=role, step=step):
                dist.barrier()

    def _observe(
        self, step: int, batch: Sequence[Rollout], experience: Experience, facts: StepFacts, rollout_s: float
    ) -> None:
        """Controllers: same inputs on every rank, but for the chunk size, whose time only the actor's output rank takes."""
        facts.delta_reason = self.scheduler.end_step(step, experience.stats.score_mean).reason
        self.kl.observe(experience.stats.kl_mean, len(batch))
        if self.actor is None or not self.config.overlap.intra:
            return
        groups = self.actor.trained.model.groups
        seconds = torch.tensor([rollout_s], dtype=torch.float64, device=self.world.device)
        if groups.all.size() > 1:
            dist.broadcast(seconds, groups.output_rank, group=groups.all)
        facts.chunk_reason = self.chunk_tuner.observe(step, float(seconds), facts.tokens_decoded).reason

    def _evaluate(self, step: int, last: bool) -> None:
        """Held-out accuracy before the first step, after the last, and every so often."""
        if self.evaluator is None or self.actor is None:
            return
        every = self.evaluator.config.every_steps
        if step == 0 or last or (every and step % every == 0):
            with self.spans.span("evaluate", role="actor", step=step):
                accuracy = self.evaluator.accuracy(self.actor.generator)
            if self.journal is not None:
                self.journal.evaluation(step, accuracy)
