"""The interface between an algorithm and the training loop: its roles, its experience, its losses.

Legend: T response tokens (packed, see `packing`), B rows (responses).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from oppo_megatron.algorithms.advantages import NOTHING_SEEN, Moments, gae
from oppo_megatron.algorithms.experience import Experience, ScoredBatch, build_experience
from oppo_megatron.algorithms.losses import ActorTargets, PolicyStats, ValueStats, actor_loss, value_loss
from oppo_megatron.algorithms.staleness import ratio_base
from oppo_megatron.config.ppo import NEEDS, AlgorithmConfig, Needs, PPOConfig


@dataclass(frozen=True)
class Algorithm(ABC):
    """One of the presets, with its settings.  A subclass says what it needs and how rewards become advantages.

    Every algorithm here has a reference and a clipped surrogate for the actor.
    """

    ppo: PPOConfig
    needs: ClassVar[Needs]

    @abstractmethod
    def advantages(self, rewards_T: Tensor, values_T: Tensor | None, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages, before whitening, and returns, both [T]; `values_T` where a critic is trained."""

    def experience(
        self, scored: ScoredBatch, kl_coefficient: float, check: bool = True, seen: Moments = NOTHING_SEEN
    ) -> Experience:
        """What the update trains on.  Raises as `build_experience` does."""
        return build_experience(scored, self.ppo, kl_coefficient, self.advantages, check, seen)

    @property
    def needs_proximal(self) -> bool:
        """Whether an update needs its tokens' log-probs under the weights that it starts from."""
        return self.ppo.staleness == "decoupled"

    def ratio_base(self, behaviour_logp_T: Tensor, proximal_logp_T: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the ratio is taken against, and each token's importance weight (None: 1), both [T]."""
        return ratio_base(behaviour_logp_T, proximal_logp_T, self.ppo.staleness)

    def actor_loss(
        self, logp_T: Tensor, entropy_T: Tensor, targets: ActorTargets, kl_coefficient: float, num_tokens: int
    ) -> tuple[Tensor, PolicyStats]:
        """The actor's loss of a micro-batch; `num_tokens` is the token count of the global minibatch."""
        return actor_loss(logp_T, entropy_T, targets, self.ppo, kl_coefficient, num_tokens)

    def critic_loss(
        self, values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, num_tokens: int
    ) -> tuple[Tensor, ValueStats]:
        """The critic's loss of a micro-batch, if a critic is trained."""
        return value_loss(values_T, old_values_T, returns_T, self.ppo.value_clip, num_tokens)


class PPO(Algorithm):
    """Proximal policy optimisation with a critic (Schulman et al. 2017): GAE over its values."""

    needs = NEEDS["ppo"]

    def advantages(self, rewards_T: Tensor, values_T: Tensor | None, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """GAE(gamma, lambda)."""
        assert values_T is not None, "PPO's advantages are taken against a critic's values"
        return gae(rewards_T, values_T, lengths_B, self.ppo.gamma, self.ppo.gae_lambda)


class ReinforcePlusPlus(Algorithm):
    """REINFORCE++ (arXiv 2501.03262, eq. 8-10): discounted returns without a baseline, whitened over the batch's tokens."""

    needs = NEEDS["reinforce_pp"]

    def advantages(self, rewards_T: Tensor, values_T: Tensor | None, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """A_t = sum over u >= t of gamma^(u-t) r_u: GAE where every value is 0 and lambda is 1."""
        return gae(rewards_T, torch.zeros_like(rewards_T), lengths_B, self.ppo.gamma, 1.0)


ALGORITHMS: dict[str, type[Algorithm]] = {"ppo": PPO, "reinforce_pp": ReinforcePlusPlus}


def make_algorithm(config: AlgorithmConfig, ppo: PPOConfig) -> Algorithm:
    """The preset that a configuration names."""
    return ALGORITHMS[config.preset](ppo)
