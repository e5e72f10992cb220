"""One rank's updates of a step under the guards' rules, and what adapts from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oppo_megatron.algorithms.experience import Experience, ScoredBatch
from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import ChunkTuner, length_gap
from oppo_megatron.control.delta_controllers import KLController
from oppo_megatron.control.guards import Breach
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import ALONE, Members, Rollout, StepSignals
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.weaving.costs import CostMeter, Costs
from oppo_megatron.train.actor import Actor, Critic, no_stats
from oppo_megatron.train.guard import Facts, Guard, RejectedBatch
from oppo_megatron.train.logs.journal import StepFacts
from oppo_megatron.train.logs.meter import StepMeter
from oppo_megatron.train.score_exchange import ScoreExchange, sum_over_ranks
from oppo_megatron.train.update import History, UpdateSettings, num_minibatches


@dataclass
class Updates:
    """`actor`, `critic`: None on other ranks.  `conclude` waits for a pending checkpoint.  `admitted`: next prompt's position."""

    config: TrainConfig
    world: World
    actor: Actor | None
    critic: Critic | None
    guard: Guard
    kl: KLController
    exchange: ScoreExchange
    meter: StepMeter
    conclude: Callable[[], None]
    admitted: Callable[[], int]
    version: int = 0
    history: History = History()

    def begin(self, step: int, batch: Sequence[Rollout]) -> None:
        if self.actor is not None and self.trains_actor(step):
            with self.meter.part("update", "actor"):
                self.actor.begin(batch, self._settings(step))

    def trains_actor(self, step: int) -> bool:
        return step > self.config.ppo.critic_warmup_steps

    def make(self, step: int, batch: Sequence[Rollout], scored: ScoredBatch) -> tuple[Experience, Breach | None]:
        """Update actor and critic, or return a guard's breach."""
        experience, breach = self.guard.examine(scored, self.kl.value, self.history.seen)
        facts = self._facts(step, experience.stats.figures())
        if breach is None:
            figures, breach = self._update(step, batch, experience)
            facts = replace(facts, figures={**facts.figures, **figures})
        else:  # drop the actor's update if it was begun
            if self.actor is not None:
                self.actor.abandon()
            if self.critic is not None:
                self.critic.stats = no_stats()
        if breach is not None:
            self.conclude()
        self.guard.handle(breach, RejectedBatch(facts, batch, scored), self.admitted(), self.exchange.refusal)
        if breach is not None:
            return experience, breach
        ppo, history = self.config.ppo, self.history
        if ppo.reward_normalization == "running":
            history = replace(history, seen=history.seen + experience.scores)
        if self.trains_actor(step):
            self.version += 1
        else:
            history = replace(history, warmed=history.warmed + ppo.epochs * num_minibatches(len(batch), self._settings(step)))
        self.history = history
        return experience, None

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

    def _update(self, step: int, batch: Sequence[Rollout], experience: Experience) -> tuple[dict[str, float], Breach | None]:
        actor = self.actor if self.trains_actor(step) else None
        critic, coefficient, settings = self.critic, self.kl.value, self._settings(step)
        roles = [role for role in (actor, critic) if role is not None]
        undo = [role.set_aside() for role in roles] if self.guard.rules.undo_updates else []
        figures: dict[str, float] = {}
        found: list[Breach | None] = []
        if actor is not None:
            with self.meter.part("update", "actor"):
                figures, breach = self.guard.watch("actor", lambda: actor.update(batch, experience, coefficient, settings))
            self.meter.facts.actor = figures
            found.append(breach)
        if critic is not None:
            with self.meter.part("update", "critic"):
                _, breach = self.guard.watch("critic", lambda: critic.update(batch, experience, settings))
            critic.stats["critic_update_s"] = self.meter.spans.totals(step, "critic")["update"]
            figures = figures | critic.stats
            found.append(breach)
        with self.world.activity.doing(f"guards, step {step}", waits=True):
            worst = self.guard.agree(found, step)
        if worst is not None:
            for back in undo:
                back()
        return figures, worst


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
