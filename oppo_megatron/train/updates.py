"""One rank's updates of a step under the guards' rules, and what adapts from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from oppo_megatron.algorithms.experience import Experience, ScoredBatch
from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import ChunkTuner, length_gap
from oppo_megatron.control.delta_controllers import KLController
from oppo_megatron.control.guards import Breach
from oppo_megatron.errors import NumericsError
from oppo_megatron.layout.placements import trains_apart
from oppo_megatron.mcore.training import Undo
from oppo_megatron.mcore.weights.weight_sync import MoveReport
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import ALONE, Members, Rollout, StepSignals
from oppo_megatron.schedule.packing import PACKING
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.weaving.costs import CostMeter, Costs
from oppo_megatron.train.actor import STATS, Actor, Critic, no_stats
from oppo_megatron.train.guard import Facts, Guard, RejectedBatch
from oppo_megatron.train.logs.journal import StepFacts
from oppo_megatron.train.logs.meter import StepMeter
from oppo_megatron.train.roles import TrainedRole
from oppo_megatron.train.score_exchange import ScoreExchange, sum_over_ranks
from oppo_megatron.train.update import History, UpdateSettings, num_minibatches


@dataclass
class Update:
    """An update of a batch that the ranks have not agreed on: what it learned from, and what this rank knows of it.

    `refused`: a breach before the update, which every rank knows.  `undo`: restores the trained models.
    """

    experience: Experience
    facts: Facts
    refused: Breach | None
    found: list[Breach | None] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)
    seconds: float = 0.0  # of the actor's


@dataclass
class Updates:
    """`actor`, `critic`: None on ranks that do not train them; `roles`: those with a model here.  `conclude` waits for a pending
    checkpoint.  `admitted`: next prompt's position.  `trainer`: rank that sends the actor's figures to those that decode, if
    these do not train it.  `ess`: of the last update; 1 before the first.
    """

    config: TrainConfig
    world: World
    actor: Actor | None
    critic: Critic | None
    roles: Mapping[str, TrainedRole]
    guard: Guard
    kl: KLController
    exchange: ScoreExchange
    meter: StepMeter
    conclude: Callable[[], None]
    admitted: Callable[[], int]
    trainer: int | None = None
    version: int = 0
    digest: int = 0  # checksum of the last published weights, if they were trained on ranks of their own
    num_made: int = 0  # optimizer steps of the actor; known to its ranks and the one with the journal
    ess: float = 1.0
    history: History = History()

    def begin(self, step: int, batch: Sequence[Rollout]) -> None:
        if self.actor is not None and self.trains_actor(step):
            with self.meter.part("update", "actor"):
                self.actor.begin(batch, self._settings(step))

    def trains_actor(self, step: int) -> bool:
        return step > self.config.ppo.critic_warmup_steps

    def make(self, step: int, batch: Sequence[Rollout], scored: ScoredBatch) -> Update:
        """Update the models that this rank trains, unless a guard refuses the batch.  `settle` follows."""
        experience, refused = self.guard.examine(scored, self.kl.value, self.history.seen)
        update = Update(experience, self._facts(step, experience.stats.figures()), refused)
        if refused is None:
            self._update(step, batch, update)
        else:  # drop the actor's update if it was begun
            if self.actor is not None:
                self.actor.abandon()
            if self.critic is not None:
                self.critic.stats = no_stats()
        return update

    def begin_publishing(self, step: int, update: Update | None) -> None:
        """Begin to send the actor's weights, old ones after a breach, or to receive them (without `update`)."""
        if update is not None and any(update.found):
            self._undo(update)
        reallocation = self.roles["actor"].reallocation if "actor" in self.roles else None
        if reallocation is not None and self.trains_actor(step) and (update is None or update.refused is None):
            reallocation.begin()

    @property
    def arrived(self) -> bool:
        """True if new weights for decoding are here, or made here."""
        moving = self.roles["actor"].reallocation
        return moving is None or moving.arrived

    def settle(self, step: int, batch: Sequence[Rollout], scored: ScoredBatch, update: Update) -> Breach | None:
        """Publish the new weights if all ranks agree, or undo the update and return the breach."""
        breach = update.refused
        if breach is None:
            elsewhere = self.trainer is not None and self.actor is None
            with self.meter.part("wait_update") if elsewhere else nullcontext():
                with self.world.activity.doing(f"guards, step {step}", waits=True):
                    breach = self.guard.agree(update.found, step)
            published = {"actor", "critic"} if self.trains_actor(step) else {"critic"}
            if breach is None:
                with self.meter.part("install") if self.trainer is not None else nullcontext():
                    moved = {name: role.publish() for name, role in self.roles.items() if name in published}
                self._learn_figures(step, update, moved.get("actor"))
            else:
                self._undo(update)
        if breach is not None:
            for role in self.roles.values():
                role.keep()
            self.conclude()
        self.guard.handle(breach, RejectedBatch(update.facts, batch, scored), self.admitted(), self.exchange.refusal)
        if breach is not None:
            return breach
        ppo, history = self.config.ppo, self.history
        if ppo.reward_normalization == "running":
            history = replace(history, seen=history.seen + update.experience.scores)
        if self.trains_actor(step):
            self.version += 1
        else:
            history = replace(history, warmed=history.warmed + ppo.epochs * num_minibatches(len(batch), self._settings(step)))
        self.history = history
        return None

    def _undo(self, update: Update) -> None:
        for back in update.undo:
            back()
        update.undo = []

    def _learn_figures(self, step: int, update: Update, moved: MoveReport | None) -> None:
        """Complete the actor's figures; if it is trained apart, send them to the other ranks."""
        if not self.trains_actor(step):
            return
        facts, figures = self.meter.facts, dict(self.meter.facts.actor)
        if self.actor is not None:
            self.num_made = self.actor.role.trained.updates
        if self.trainer is not None:
            names = [*self.guard.algorithm.figure_names, *STATS, *PACKING, "train_s", "updates", "digest"]
            mine, digest = None, self._digest()
            if self.world.rank == self.trainer:
                own = figures | {"train_s": update.seconds, "updates": self.num_made, "digest": digest}
                mine = torch.tensor([own[name] for name in names], dtype=torch.float64)
            shared = self.exchange.shared(f"figures of the actor's update, step {step}", mine, len(names), self.trainer)
            figures = dict(zip(names, shared.tolist(), strict=True))
            self.num_made, self.digest = int(figures.pop("updates")), int(figures.pop("digest"))
            if digest not in (0, self.digest):
                raise NumericsError(
                    f"step {step}: the weights that decode have the checksum {digest:#010x}, but those that were trained "
                    f"{self.digest:#010x}; something wrote to one of them. Resume from the last checkpoint"
                )
        self.ess = figures.get("ess", self.ess)
        if moved is not None:
            figures |= {"reallocated_bytes": moved.bytes_moved, "reallocate_s": moved.seconds}
        facts.actor = figures

    def _digest(self) -> int:
        """Checksum of the weights here, if the actor is trained on ranks of its own; else 0."""
        reallocation = self.roles["actor"].reallocation if "actor" in self.roles else None
        return 0 if reallocation is None or not trains_apart(self.config) else reallocation.digest()

    def _settings(self, step: int) -> UpdateSettings:
        return UpdateSettings.of(self.config, step, self.world.device, self.version)

    def _facts(self, step: int, figures: dict[str, float]) -> Facts:
        updates = None  # of the actor; unknown on a rank with neither role
        if self.actor is not None:
            updates = self.actor.role.trained.updates
        elif self.critic is not None:  # the critic has made as many, plus its warm-up's
            updates = self.critic.role.trained.updates - self.history.warmed
        history, seed = self.history.numbers() | {"updates": updates}, self.config.seed
        return Facts(step, seed, self.guard.total_steps, self.version, self.kl.value, "", "", figures, history)

    def _update(self, step: int, batch: Sequence[Rollout], update: Update) -> None:
        actor = self.actor if self.trains_actor(step) else None
        critic, coefficient, settings, experience = self.critic, self.kl.value, self._settings(step), update.experience
        if self.guard.rules.undo_updates:
            update.undo = [Undo(each.role.trained).restore for each in (actor, critic) if each is not None]
        figures: dict[str, float] = {}
        if actor is not None:
            with self.meter.part("update", "actor"):
                figures, breach = self.guard.watch("actor", lambda: actor.update(batch, experience, coefficient, settings))
            self.meter.facts.actor = figures
            update.seconds = self.meter.spans.totals(step, "actor")["update"]
            update.found.append(breach)
        if critic is not None:
            with self.meter.part("update", "critic"):
                _, breach = self.guard.watch("critic", lambda: critic.update(batch, experience, settings))
            critic.stats["critic_update_s"] = self.meter.spans.totals(step, "critic")["update"]
            figures = figures | critic.stats
            update.found.append(breach)
        update.facts = replace(update.facts, figures={**update.facts.figures, **figures})


COSTS_KEPT = 0.5
"""Weight of earlier measurements relative to the current step's."""


@dataclass
class Adaptation:
    """One rank's controllers and the measured `costs` of its actions.  All ranks decide the same, from shared figures."""

    world: World
    scheduler: OvercommitScheduler
    chunk: ChunkTuner
    kl: KLController
    planner: RoundPlanner
    costs: CostMeter
    members: Members = ALONE
    _learned: int = 0  # steps

    def __post_init__(self) -> None:
        self._of_run, self._of_late = CostMeter(self.costs.stages), CostMeter(self.costs.stages)

    def learn_costs(self, step: int) -> None:
        """Update the cost model from all ranks' measurements; call before the update, when ranks have just met."""
        sums = self.costs.take()
        self._learned += 1
        warm = self._learned > 2
        self._of_run.join(sums, keep=float(warm))  # the first step is a warm-up, and counts only if no other follows
        if self.planner.generator != "woven":
            return
        with waiting_for(f"measured costs, step {step}", self.world.activity):
            sums = sum_over_ranks(sums, self.world.device)
        self._of_late.join(sums, COSTS_KEPT)
        self.planner.learn(self._of_late.costs(Costs()))

    def measured_costs(self) -> Costs | None:
        sums = sum_over_ranks(self._of_run.to_vector(), self.world.device)
        of_run = CostMeter(self.costs.stages, sums)
        return None if of_run.empty else of_run.costs(Costs())

    def learn_batch(
        self, facts: StepFacts, batch: Sequence[Rollout], experience: Experience, *, actor_trained: bool = True
    ) -> None:
        assert facts.scores is not None
        with facts.planning():
            facts.length_gap = length_gap(batch, self.members.to_train(self.scheduler.buffer.rollouts))
            if not actor_trained:
                facts.delta_reason = f"step {facts.step}: delta stays, the critic warms up"
                return
            signals = StepSignals(experience.stats.shaped_score_mean, facts.tail_waste, facts.scores.ess, facts.length_gap)
            facts.delta_reason = self.scheduler.end_step(facts.step, signals).reason
            if experience.stats.kl_mean is not None:
                self.kl.observe(experience.stats.kl_mean)
