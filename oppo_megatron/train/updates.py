"""The updates of a step on one rank, under the guards' rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oppo_megatron.algorithms.experience import Experience, ScoredBatch
from oppo_megatron.cluster.world import World
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.guards import Breach
from oppo_megatron.control.kl_controller import KLController
from oppo_megatron.records import Rollout
from oppo_megatron.train.actor import Actor
from oppo_megatron.train.critic import Critic, no_stats
from oppo_megatron.train.guards.guard import Evidence, Guard
from oppo_megatron.train.metering.meter import StepMeter
from oppo_megatron.train.score_exchange import ScoreExchange
from oppo_megatron.train.update import History, UpdateSettings, num_minibatches


@dataclass
class Updates:
    """`actor` and `critic` are None where the rank has no part in them, or the algorithm no critic.

    `version` is the policy's, updates of the actor so far, and like `history` the same on every rank.  `conclude` waits for the
    checkpoint that is being written, if there is one: a guard may go back to it.  `admitted` is the position in the stream of
    prompts behind the last one admitted.
    """

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
        """What of the actor's update needs no scores."""
        if self.actor is not None and self.trains_actor(step):
            with self.meter.part("update", "actor"):
                self.actor.begin(batch, self._settings(step))

    def trains_actor(self, step: int) -> bool:
        """False while the critic warms up."""
        return step > self.config.ppo.critic_warmup_steps

    def make(self, step: int, batch: Sequence[Rollout], scored: ScoredBatch) -> tuple[Experience, Breach | None]:
        """Update actor and critic with the batch, or leave them as they are where a guard finds fault, and say with what.

        Raises where the run is to stop, or to go back.
        """
        experience, breach = self.guard.examine(scored, self.kl.value, self.history.seen)
        evidence = self._evidence(step, batch, scored, experience)
        if breach is not None:
            self._settle(breach, evidence)
            self._abandon()
            return experience, breach
        figures, breach = self._update(step, batch, experience)
        self._settle(breach, replace(evidence, figures={**evidence.figures, **figures}))
        if breach is None:
            self._remember(step, batch, experience)
        return experience, breach

    def _remember(self, step: int, batch: Sequence[Rollout], experience: Experience) -> None:
        """An update has been made, and stays."""
        ppo, history = self.config.ppo, self.history
        if ppo.reward_normalization == "running":
            history = replace(history, seen=history.seen + experience.scores)
        if self.trains_actor(step):
            self.version += 1
        else:
            history = replace(
                history, warmed=history.warmed + ppo.epochs * num_minibatches(len(batch), self._settings(step))
            )
        self.history = history

    def _settings(self, step: int) -> UpdateSettings:
        return UpdateSettings.of(self.config, step, self.world.device, self.version)

    def _evidence(self, step: int, batch: Sequence[Rollout], scored: ScoredBatch, experience: Experience) -> Evidence:
        figures = experience.stats.figures()
        history = self.history.numbers() | {"updates": self._actor_updates}
        return Evidence(step, self.version, self.kl.value, batch, scored, figures, history, self.exchange.refusal)

    @property
    def _actor_updates(self) -> int | None:
        """Optimizer steps that the actor has made, of which a step's number may have changed with a resume; the critic has made
        as many beside those of its warm-up.  None on a rank that has neither."""
        if self.actor is not None:
            return self.actor.role.trained.updates
        return None if self.critic is None else self.critic.role.trained.updates - self.history.warmed

    def _settle(self, breach: Breach | None, evidence: Evidence) -> None:
        if breach is not None:
            self.conclude()
        self.guard.settle(breach, evidence, self.admitted())

    def _abandon(self) -> None:
        """No update is made; the actor's may have been begun."""
        if self.actor is not None:
            self.actor.abandon()
        if self.critic is not None:
            self.critic.stats = no_stats()

    def _update(
        self, step: int, batch: Sequence[Rollout], experience: Experience
    ) -> tuple[dict[str, float], Breach | None]:
        """Statistics, and where a guard finds fault, what it is; the update is taken back if it may be."""
        actor = self.actor if self.trains_actor(step) else None
        critic, coefficient, settings = self.critic, self.kl.value, self._settings(step)
        roles = [role for role in (actor, critic) if role is not None]
        undo = [role.set_aside() for role in roles] if self.guard.rules.undo_updates else []
        figures: dict[str, float] = {}
        found: list[Breach | None] = []
        if actor is not None:
            with self.meter.part("update", "actor"):
                figures, breach = self.guard.watch(
                    "actor", lambda: actor.update(batch, experience, coefficient, settings)
                )
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
        if worst is not None and worst.action == "skip":
            for back in undo:
                back()
        return figures, worst
