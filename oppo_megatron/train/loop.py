"""The training loop.  Plain PPO, every overlap and every algorithm are this loop under other plans, schedules and parts.

Every rank runs it.  Prompts, buffer, books and controllers are the same on all ranks and advance by the chunks alone, so
no rank asks another what to do next.  A step is a number of rounds, then the update:

    ranks of the actor      decode a chunk, send it, continue; at the step's end begin the actor's update, wait for the scores
                            when the update first needs them, complete it
    ranks of the scorers    prefill the chunk before on reward, reference and critic; at the step's end send the scores,
                            update the critic, while the actor may already decode the next step

A rank that has both does both, as the round's schedule says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from oppo_megatron.algorithms.experience import ScoredBatch
from oppo_megatron.chunks import Chunk
from oppo_megatron.cluster.world import World
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.occupancy import Occupancy
from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.errors import SamplingError
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.plan import StepPlan, plan_step
from oppo_megatron.train.actor import Actor, Critic
from oppo_megatron.train.evaluate import Evaluator
from oppo_megatron.train.logs.journal import Journal
from oppo_megatron.train.logs.meter import RolloutPhase, StepMeter
from oppo_megatron.train.logs.step import StepFacts
from oppo_megatron.train.rollouts import Rollouts
from oppo_megatron.train.run_state import RunState
from oppo_megatron.train.saving.saver import Saver
from oppo_megatron.train.score_exchange import ScoreExchange
from oppo_megatron.train.updates import Adaptation, Updates


@dataclass
class TrainingLoop:
    """One rank's view of a run."""

    config: TrainConfig
    world: World
    rollouts: Rollouts
    exchange: ScoreExchange
    updates: Updates
    adaptation: Adaptation
    evaluator: Evaluator | None
    saver: Saver
    meter: StepMeter
    state: RunState

    def run(self) -> bool:
        """Train until the prompts end and every rollout has been trained; False if the run was asked to stop and has saved."""
        if self.state.done == 0 and self.state.phase is None:
            self._evaluate(last=False)
        while not self.over:
            step = self.state.done + 1
            with self.world.activity.doing(f"step {step}"):
                complete = self._step(step, plan_step(self.config))
            if complete and self.state.done < step:
                self._end_of_prompts()
                break
            if complete:
                self._evaluate(last=self.over)
            if not complete or self.saver.due(self.state.done):
                self.saver.save(self.state)
                if not complete or (self.saver.stopping and not self.over):
                    return False
        self._conclude()
        return True

    def _step(self, step: int, plan: StepPlan) -> bool:
        """Make one step of the paper's Algorithm 1, or the rest of one; False if the run was asked to stop within it.

        No step is made if a filter has dropped all of the last prompts.
        """
        self._admit(step)
        while not self.rollouts.complete:
            chunk = self._decode(plan)  # while the scorers prefill the chunk before
            if chunk.halt:
                return False
        batch = self.rollouts.take_batch()
        self.state.phase = None
        if not batch:
            return True
        self._finish_scoring(batch)
        trained = self.exchange.members.to_train(batch)
        if plan.forward_ahead:
            self.updates.begin(step, trained)
        scored = self._gather_scores(step, batch)
        self.meter.facts.filtered = self.rollouts.filter_figures()
        self.adaptation.learn_costs(step)
        experience, breach = self.updates.make(step, trained, scored)
        actor_trained = self.updates.trains_actor(step)
        self._end_update(plan, changed=breach is None, actor_trained=actor_trained)
        if breach is None:
            self.adaptation.learn_batch(self.meter.facts, trained, experience, actor_trained=actor_trained)
        else:
            self.meter.facts.skipped = breach.reason
        self.adaptation.learn_times(self.meter.facts, self.meter.cost())
        self.meter.end(batch, self.rollouts.buffer.rollouts, experience)
        self.state.done = step
        return True

    @property
    def over(self) -> bool:
        """True if nothing is left to train; a run resumed with fewer steps, or ended early, may have rollouts left."""
        stopped = self.evaluator is not None and self.evaluator.over
        return self.rollouts.scheduler.done or self.state.done == self.config.steps or stopped

    @property
    def rounds(self) -> RoundRunner:
        return self.rollouts.rounds

    @property
    def actor(self) -> Actor | None:
        return self.updates.actor

    @property
    def critic(self) -> Critic | None:
        return self.updates.critic

    @property
    def journal(self) -> Journal | None:
        return self.meter.journal

    def _admit(self, step: int) -> None:
        """Admit the step's prompts, unless the step was interrupted after that."""
        interrupted, buffer = self.state.phase, self.rollouts.buffer
        if interrupted is None:
            facts = StepFacts(step, buffer.delta, self.adaptation.chunk.value, version=self.updates.version)
            facts.checkpoint_s, facts.checkpoint_bytes, facts.checkpoint_hidden_s = self.saver.take_cost()
            self.state.phase = RolloutPhase(facts, Occupancy(buffer.clock), buffer.clock)
        assert self.state.phase is not None
        self.meter.begin(self.state.phase)
        if interrupted is None:
            self.rollouts.admit()

    def _decode(self, plan: StepPlan) -> Chunk:
        clock = self.rollouts.buffer.clock
        with self.meter.round():
            halt = self.actor is not None and self.saver.told_to_stop(self.actor.role.serving.groups.all)
            chunk, backfilled = self.rollouts.decode(
                self.adaptation.chunk.value, self.updates.version, stream=plan.stream, halt=halt
            )
        self.meter.decoded(chunk, clock, backfilled)
        return chunk

    def _finish_scoring(self, batch: Sequence[Rollout]) -> None:
        with self.meter.drain():
            while self.rollouts.owed(batch):
                self.rollouts.score(batch, self.adaptation.chunk.value, self.updates.version)
                self.meter.scoring_round()

    def _gather_scores(self, step: int, batch: Sequence[Rollout]) -> ScoredBatch:
        """Bring the scores, and the state of all ranks, to every rank."""
        with self.meter.part("send" if self.actor is None else "wait_scores"):
            scored, report = self.exchange.gather(
                batch, self.rounds, self.meter.scoring_seconds(), self.meter.clock.work, self.meter.measured,
                self.rollouts.judged,
            )  # fmt: skip
            self.meter.all_memory()
            self.saver.meet(step, float(scored.scores_B.double().mean()))
        self.meter.scored(scored, report, self.adaptation.kl.value)
        self.rollouts.retire(batch)
        return scored

    def _end_update(self, plan: StepPlan, changed: bool, actor_trained: bool) -> None:
        """Invalidate caches of changed weights; the ranks meet if the next step waits for the critic."""
        if changed:
            self.rollouts.weights_changed(actor_trained)
        self.rounds.executor.drain()
        self.meter.memory.look()
        if plan.wait_for_critic and self.world.size > 1:
            with self.meter.part("wait_update"):
                dist.barrier()

    def _evaluate(self, last: bool) -> None:
        """Measure held-out metrics before the first step, after the last, and every `every_steps` steps."""
        step = self.state.done
        if self.evaluator is None or not self.evaluator.due(step, last):
            return
        with self.meter.evaluation(step):
            figures = self.evaluator.measure(self, step)
        self.saver.look_at(step, figures)
        if self.journal is not None:
            self.journal.evaluation(step, figures)

    def _end_of_prompts(self) -> None:
        """End the run: the filter has dropped all remaining groups."""
        done, figures = self.state.done, self.rollouts.filter_figures()
        told = f"the prompts have ended: none of the last {figures['groups_dropped']} groups was worth training"
        if not done:
            raise SamplingError(
                f"{told}, and no step was made; use prompts that the policy answers rightly now and then"
            )
        if self.journal is not None:
            self.journal.progress.note(told)
        if self.evaluator is not None and not self.evaluator.due(done, last=False):
            self._evaluate(last=True)

    def _conclude(self) -> None:
        """Complete the run after the last step of every rank."""
        self.state.finish_step()
        self.meter.spans.flush()
        self.saver.conclude()
        if self.journal is not None:
            self.journal.end(None if self.evaluator is None else self.evaluator.describe_end())
