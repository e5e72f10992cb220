"""The training loop, which every rank runs.  Plain PPO, every overlap and every algorithm differ only in its plans and parts.

Prompts, buffer, books and controllers are the same on all ranks and change only with the chunks, so no rank asks another what to
do next.  A step is a number of rounds, then the update:

Ranks with the actor decode a chunk per round and send it; then they begin the actor's update, and complete it with the scores.
Ranks with scorers prefill the previous chunk; then they send the scores and update the critic, while the actor may already decode
the next step.  A rank with both roles follows the round's schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from oppo_megatron.algorithms.experience import ScoredBatch
from oppo_megatron.chunks import Chunk, Orders
from oppo_megatron.cluster.world import World
from oppo_megatron.config.evaluation import REWARD
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import Occupancy
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.errors import SamplingError
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.schedule.plan import StepPlan, plan_step
from oppo_megatron.train.evaluate import Evaluator
from oppo_megatron.train.logs.journal import StepFacts
from oppo_megatron.train.logs.meter import RolloutPhase, StepMeter
from oppo_megatron.train.rollouts import Rollouts
from oppo_megatron.train.saving.saver import Saveable, Saver
from oppo_megatron.train.saving.state import Found, books_state, frozen_models, make_rollouts, rest_of_run, rollout_lines
from oppo_megatron.train.saving.writing import (
    ROLLOUTS,
    CacheContents,
    cache_path,
    gather_caches,
    load_caches,
    require_sound_books,
)
from oppo_megatron.train.score_exchange import ScoreExchange
from oppo_megatron.train.update import History
from oppo_megatron.train.updates import Adaptation, Update, Updates


@dataclass
class Taken:
    """A complete batch, with the rollout phase that made it and the decode clock at which it was complete."""

    batch: list[Rollout]
    phase: RolloutPhase
    clock: int
    scored: ScoredBatch | None = None
    update: Update | None = None  # on ranks that train ahead of the installation

    def state_dict(self) -> dict[str, Any]:
        seq_ids = [rollout.seq_id for rollout in self.batch]
        figures = self.phase.facts.figures
        return {"clock": self.clock, "seq_ids": seq_ids, "phase": self.phase.state_dict(), "figures": figures}


@dataclass
class TrainingLoop(Saveable):
    """One rank's part in a run.  `done`: trained steps; `phase`: the rollout phase of the step in progress, or None."""

    config: TrainConfig
    world: World
    prompts: PromptSet
    rollouts: Rollouts
    exchange: ScoreExchange
    updates: Updates
    adaptation: Adaptation
    evaluator: Evaluator | None
    saver: Saver
    meter: StepMeter
    done: int = 0
    phase: RolloutPhase | None = None

    def __post_init__(self) -> None:
        self.rounds, self.buffer = self.rollouts.rounds, self.rollouts.buffer
        self.actor, self.critic, self.journal = self.updates.actor, self.updates.critic, self.meter.journal
        self.rollbacks = self.updates.guard.rollbacks

    def run(self) -> bool:
        """Train until the run is over, and return True; if asked to stop, save and return False."""
        if self.done == 0 and self.phase is None:
            self._evaluate(last=False)
        while not self.over:
            step = self.done + 1
            with self.world.activity.doing(f"step {step}"):
                complete = self._step(step, plan_step(self.config))
            if complete and self.done < step:
                self._end_of_prompts()
                break
            if complete:
                self._evaluate(last=self.over)
            if not complete or self.saver.due(self.done):
                self.saver.save(self)
                if not complete or (self.saver.stopping and not self.over):
                    return False
        self.finish_step()
        self.meter.spans.flush()
        self.saver.conclude()
        if self.journal is not None:
            self.journal.end(None if self.evaluator is None else self.evaluator.describe_end())
        return True

    def _step(self, step: int, plan: StepPlan) -> bool:
        """Make or complete a step (paper, Algorithm 1), unless the filter has dropped everything left; False if asked to stop."""
        self._admit(step)
        while not self.rollouts.complete:
            chunk = self._decode(plan)  # while the scorers prefill the chunk before
            if Orders.HALT in chunk.orders:
                return False
        taken = self._take()
        if taken.batch:
            self._score(step, taken, plan)
            self._train(step, taken, plan)
        return True

    def _take(self) -> Taken:
        """Take the complete batch, which ends its rollout phase."""
        assert self.phase is not None
        phase, self.phase = self.phase, None
        phase.facts.figures = self.rollouts.figures()
        return Taken(self.rollouts.take_batch(), phase, self.buffer.clock)

    def _score(self, step: int, taken: Taken, plan: StepPlan) -> None:
        """Wait until every scorer has read the batch, and share its scores."""
        batch, started = taken.batch, time.monotonic()
        while self.rounds.owes(batch):  # a scorer, on any rank, has not read all of it
            self.rollouts.score(batch, self.adaptation.chunk.value, self.updates.version)
            self.meter.end_round(decoded=False)
        self.meter.tracer.flush()
        self.meter.facts.drain_s = time.monotonic() - started
        if plan.forward_ahead:
            self.updates.begin(step, self.exchange.members.to_train(batch))
        taken.scored = self._gather_scores(step, batch)
        self.adaptation.learn_costs(step)

    def _train(self, step: int, taken: Taken, plan: StepPlan) -> None:
        """Train on the scored batch, decode with the new weights from now on, and end the step."""
        batch, trained, facts = taken.batch, self.exchange.members.to_train(taken.batch), self.meter.facts
        assert taken.scored is not None
        facts.version = self.updates.version
        update = taken.update or self.updates.make(step, trained, taken.scored)
        breach, experience = self.updates.settle(step, trained, taken.scored, update), update.experience
        actor_trained = self.updates.trains_actor(step)
        if breach is None:
            facts.tokens_kept = self.rollouts.weights_changed(actor_trained, self.updates.version)
        self.rounds.executor.finish_sends()
        self.meter.memory.look()
        if plan.wait_for_critic and self.world.size > 1:
            with self.meter.part("wait_update"):
                dist.barrier()
        if breach is None:
            self.adaptation.learn_batch(facts, trained, experience, actor_trained=actor_trained)
        else:
            facts.skipped = breach.reason
        if self.config.overlap.intra:
            facts.chunk_reason = self.adaptation.chunk.observe(step, self.meter.cost()).reason
        self.meter.end(batch, self.buffer.rollouts, experience)
        self.done = step

    @property
    def over(self) -> bool:
        """True if nothing is left to train."""
        stopped = self.evaluator is not None and self.evaluator.over
        return self.exhausted or self.done == self.config.steps or stopped

    @property
    def exhausted(self) -> bool:
        return self.rollouts.scheduler.done

    @property
    def queued(self) -> Sequence[Rollout]:
        """Rollouts of complete batches that are not scored yet."""
        return ()

    def _admit(self, step: int) -> None:
        if self.phase is not None:  # a stop has interrupted it
            self.meter.begin(self.phase)
            return
        self._begin_phase(step)
        self.rollouts.admit()

    def _begin_phase(self, step: int) -> None:
        chunk, version = self.adaptation.chunk.value, self.updates.version
        facts = StepFacts(step, self.buffer.delta, chunk, version=version, **self.saver.take_cost())
        self.phase = RolloutPhase(facts, Occupancy(self.buffer.clock), self.buffer.clock)
        self.meter.begin(self.phase)
        self.rollouts.begin_phase()

    def _decode(self, plan: StepPlan, most: int | None = None) -> Chunk:
        """Decode a chunk, of at most `most` steps."""
        clock, started = self.buffer.clock, time.monotonic()
        orders = Orders.NONE if self.rounds.decode is None else self._orders(self.rounds.decode.model.groups.all)
        steps, version = self.adaptation.chunk.value, self.updates.version
        steps, queued = steps if most is None else min(steps, most), self.queued if plan.stream else ()
        chunk, backfilled = self.rollouts.decode(steps, version, queued, stream=plan.stream, orders=orders)
        self.meter.decoded(chunk, clock, backfilled, time.monotonic() - started)
        return chunk

    def _orders(self, deciding: dist.ProcessGroup) -> Orders:
        """Return the next chunk's orders; collective of the ranks that decode."""
        return Orders.HALT if self.saver.preemption.agreed(deciding, self.world.activity) else Orders.NONE

    def _gather_scores(self, step: int, batch: Sequence[Rollout]) -> ScoredBatch:
        with self.meter.part("send" if self.rounds.scoring and self.rounds.decode is None else "wait_scores"):
            scored, report = self.exchange.gather(
                batch, self.rounds, self.meter.scoring_seconds(), self.meter.clock.work,
                lambda: [self.updates.ess, *self.meter.measured()],
                self.rollouts.judged,
            )  # fmt: skip
            self.meter.all_memory()
            self.saver.look_at(step, {REWARD: (float(scored.scores_B.double().mean()), None)})
            self.saver.look_around()
        self.meter.scored(scored, report, self.adaptation.kl.value)
        self.rollouts.retire(batch)
        return scored

    def _evaluate(self, last: bool) -> None:
        if self.evaluator is None or not self.evaluator.due(self.done, last):
            return
        span = self.meter.spans.span("evaluate", role=self.meter.role, step=self.done)
        with span, self.world.activity.doing(f"evaluation after step {self.done}"):
            figures = self.evaluator.measure(self.done)
        self.saver.look_at(self.done, figures)
        if self.journal is not None:
            self.journal.evaluation(self.done, figures)

    def _end_of_prompts(self) -> None:
        dropped = self.rollouts.figures()["groups_dropped"]
        text = f"the prompts have ended: none of the last {dropped} groups was worth training"
        if not self.done:
            raise SamplingError(f"{text}, and no step was made; use prompts that the policy answers rightly now and then")
        if self.journal is not None:
            self.journal.note(text)
        if self.evaluator is not None and not self.evaluator.due(self.done, last=False):
            self._evaluate(last=True)

    @property
    def position(self) -> Position:
        return Position(self.done, -1 if self.phase is None else self.buffer.clock)

    @property
    def models(self) -> Mapping[str, TrainedModel]:
        roles = {"actor": self.actor, "critic": self.critic}
        return {name: role.role.trained for name, role in roles.items() if role is not None}

    @property
    def note(self) -> Callable[[str], None] | None:
        return None if self.journal is None else self.journal.note

    def finish_step(self) -> None:
        if self.meter.completed < self.done:
            with self.meter.part("wait_update"):
                critic_stats = self.exchange.critic_stats()
                self.meter.all_memory()
            self.meter.complete(self.done, critic_stats)
        self.meter.tracer.flush()
        self.meter.spans.flush()
        self.rounds.executor.finish_sends()
        self.meter.memory.of_all_ranks()

    def state_dict(self) -> dict[str, Any]:
        assert self.journal is not None
        parts = {name: None if part is None else part.state_dict() for name, part in self._parts.items()}
        return parts | books_state(self.rounds) | {
            "done": self.done, "scheduler": self.rollouts.scheduler.state_dict(), "journal": self.journal.state_dict(),
            "actor": {"version": self.updates.version, "ess": self.updates.ess}, "history": self.updates.history.numbers(),
            "updates": self.updates.num_made,  # the critic has made as many, plus its warm-up's
            "phase": None if self.phase is None else self.phase.state_dict(),
        }  # fmt: skip

    @property
    def _parts(self) -> dict[str, Any]:
        """Parts whose state is the same on all ranks, for checkpoints; None if the run lacks one."""
        adaptation = self.adaptation
        return {
            "filter": self.rollouts.filter, "chunk": adaptation.chunk, "kl": adaptation.kl, "early_stop": self.evaluator,
            "guard": self.updates.guard,
        }  # fmt: skip

    def texts(self) -> dict[str, str]:
        held = sorted([*self.queued, *self.buffer.rollouts], key=lambda rollout: (rollout.admission, rollout.seq_id))
        return {ROLLOUTS: "".join(rollout_lines(held))}

    def caches(self, *, copied: bool) -> CacheContents:
        return gather_caches(self.rounds, copied=copied)

    def on_complete(self) -> Callable[[], None]:
        return partial(setattr, self.rollbacks, "checkpoint", (self.position.name, self.rollouts.scheduler.position))

    def restore(self, found: Found) -> None:
        """Continue from a checkpoint.  Books and caches are restored only with the same layout, frozen models and rollouts."""
        left_out = self.rollbacks.left_out
        rest_of_run(found, self.saver.data, self.config, self.prompts, left_out)
        self.saver.load(self, found)
        for role in self.updates.roles.values():
            role.publish()
        stream = PromptStream(self.prompts, self.config.seed, shuffle=self.config.data.shuffle)
        held = make_rollouts(found.held(left_out), stream)
        self.load_state_dict(found.state, held)
        self.rollbacks.checkpoint = found.folder.name, found.position
        lost, state = len(held) < len(found.rollouts), found.state
        same = not lost and state["layout"] == books_state(self.rounds)["layout"]
        if same and frozen_models(state["config"]) == frozen_models(self.saver.settings):  # else all is prefilled again
            require_sound_books(state, [*self.queued, *self.buffer.rollouts])
            planner = self.rounds.planner
            for name, book in {"actor": planner.actor, **planner.scorers}.items():
                book.load_state_dict(state["books"][name])
            load_caches(cache_path(found.folder, self.world.rank), self.rounds)
        if self.position.clock >= 0 and (lost or len(self.buffer) < self.buffer.target):  # the batch may also be larger now
            self.rounds.admit(self.rollouts.scheduler.refill())

    def load_state_dict(self, state: Mapping[str, Any], held: Sequence[Rollout]) -> None:
        """Restore `state_dict` and the rollouts in flight (`held`); `restore` loads books and caches."""
        self.done = self.meter.completed = state["done"]
        self.rollouts.scheduler.load_state_dict(state["scheduler"], held)
        self.buffer.pending = 0  # all batches that were taken are trained, or among the `held`
        for name, part in self._parts.items():
            if part is not None:
                part.load_state_dict(state[name])
        self.updates.version, self.updates.history = state["actor"]["version"], History.of(state["history"])
        self.updates.ess, self.updates.num_made = state["actor"]["ess"], state["updates"]
        within = state.get("halted", True) and not state.get("queue")  # continuous generation also has a phase between steps
        if state["phase"] is not None and within:
            self.phase = RolloutPhase.from_state(state["phase"])
        if self.journal is not None:
            self.journal.load_state_dict(state["journal"])
        self.rounds.admit([*self.queued, *self.buffer.rollouts])
