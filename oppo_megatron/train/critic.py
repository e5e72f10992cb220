"""The critic on its ranks: its updates, during which the actor may already decode the next step.

Legend: T response tokens of a batch (packed).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience
from oppo_megatron.mcore.batch import MicroBatch
from oppo_megatron.records import Rollout
from oppo_megatron.train.trained_role import TrainedRole
from oppo_megatron.train.update import UpdateSettings, run_update, stats_dict

CRITIC_STATS = ("critic_loss", "critic_clip_fraction", "critic_error", "critic_grad_norm", "critic_update_s")


@dataclass
class Critic:
    """The value model and its optimizer.  `stats`: of its last update, on every rank of the critic."""

    role: TrainedRole
    algorithm: Algorithm
    stats: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CRITIC_STATS, 0.0))

    def update(self, batch: Sequence[Rollout], experience: Experience, settings: UpdateSettings) -> dict[str, float]:
        """Value epochs over the batch, then the new weights to where they score.  Returns statistics, on every rank.

        Raises NumericsError, on every rank, for a gradient that is not finite; `stats` are then none.
        """
        self.stats = no_stats()

        def loss(micro: MicroBatch, output: Tensor, num_tokens: int, first: bool) -> tuple[Tensor, dict[str, Tensor]]:
            value, stats = self.algorithm.critic_loss(
                output, micro.extra["old_values"], micro.extra["returns"], num_tokens
            )
            return value, stats_dict(stats)

        assert experience.old_values_T is not None, "a critic has given values"
        extra = {"old_values": experience.old_values_T, "returns": experience.returns_T}
        self.role.retire()
        reports = run_update(self.role.trained, batch, extra, loss, settings)
        stats = {}
        if "num_tokens" in reports[0]:
            tokens = sum(r["num_tokens"] for r in reports)
            stats = {
                "critic_loss": sum(r["loss"] for r in reports) / tokens,
                "critic_clip_fraction": sum(r["clipped"] for r in reports) / tokens,
                "critic_error": sum(r["squared_error"] for r in reports) / tokens,
                "critic_grad_norm": sum(r["grad_norm"] for r in reports) / len(reports),
            }
        self.stats = self.role.share(stats, CRITIC_STATS)
        self.role.publish()
        return self.stats

    def set_aside(self) -> Callable[[], None]:
        """What takes back every update from now on, where it is called; `stats` stay."""
        return self.role.undo()


def no_stats() -> dict[str, float]:
    """The statistics of an update that was not made."""
    return dict.fromkeys(CRITIC_STATS, math.nan) | {"critic_update_s": 0.0}
