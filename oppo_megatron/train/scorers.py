"""The scorers on their ranks: reward, reference and critic prefill what the actor streams, and the critic is updated.

Legend: T response tokens of a batch (packed), B rollouts of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from oppo_megatron.algorithms.experience import Experience
from oppo_megatron.algorithms.losses import value_loss
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.records import Rollout
from oppo_megatron.runtime.batch import MicroBatch
from oppo_megatron.runtime.mcore.training import TrainedModel
from oppo_megatron.runtime.scoring import Scorer
from oppo_megatron.train.update import UpdateSettings, run_update, stats_dict

CRITIC_STATS = ("critic_loss", "critic_clip_fraction", "critic_error", "critic_grad_norm", "critic_update_s")


@dataclass
class ScorerSide:
    """All scoring roles that this rank has a part in, and the critic's optimizer."""

    scorers: dict[str, Scorer]
    critic: TrainedModel
    ppo: PPOConfig
    critic_stats: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CRITIC_STATS, 0.0))

    def advance(self, rollouts: Sequence[Rollout]) -> None:
        """Every role prefills what is new of the rollouts."""
        for scorer in self.scorers.values():
            scorer.advance(rollouts)

    def forget(self, rollouts: Sequence[Rollout]) -> None:
        """The rollouts have been scored and are about to be trained."""
        for scorer in self.scorers.values():
            for rollout in rollouts:
                scorer.forget(rollout.seq_id)

    def update_critic(self, batch: Sequence[Rollout], experience: Experience, settings: UpdateSettings) -> None:
        """Value epochs over the batch.  What the old critic computed for carried rollouts is forgotten."""

        def loss(micro: MicroBatch, output: Tensor, num_tokens: int, first: bool) -> tuple[Tensor, dict[str, Tensor]]:
            value, stats = value_loss(
                output, micro.extra["old_values"], micro.extra["returns"], self.ppo.value_clip, num_tokens
            )
            return value, stats_dict(stats)

        extra = {"old_values": experience.old_values_T, "returns": experience.returns_T}
        reports = run_update(self.critic, batch, extra, loss, settings)
        self.scorers["critic"].reset()
        if "num_tokens" in reports[0]:
            tokens = sum(r["num_tokens"] for r in reports)
            self.critic_stats = {
                "critic_loss": sum(r["loss"] for r in reports) / tokens,
                "critic_clip_fraction": sum(r["clipped"] for r in reports) / tokens,
                "critic_error": sum(r["squared_error"] for r in reports) / tokens,
                "critic_grad_norm": sum(r["grad_norm"] for r in reports) / len(reports),
                "critic_update_s": 0.0,
            }
