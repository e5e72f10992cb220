"""The interface between an algorithm and the training loop: how scores become advantages, and the losses.

Legend: T response tokens (packed, see `packed`), B responses, N of them in a minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from oppo_megatron.algorithms.advantages import NOTHING_SEEN, Moments
from oppo_megatron.algorithms.experience import Experience, ScoredBatch, build_experience
from oppo_megatron.algorithms.losses import ActorTargets, PolicyStats, Surrogate, ValueStats, actor_loss, value_loss
from oppo_megatron.algorithms.overlong import NO_LIMIT, Overlong
from oppo_megatron.algorithms.reduction import row_weights
from oppo_megatron.algorithms.staleness import ratio_base
from oppo_megatron.config.algorithm import AlgorithmConfig
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.config.run import TrainConfig


@dataclass(frozen=True)
class Algorithm:
    """What the choices of a configuration come to.  `longest` is the limit of a response, in tokens."""

    choices: AlgorithmConfig
    ppo: PPOConfig
    group_size: int
    longest: int
    overlong: Overlong = NO_LIMIT

    @classmethod
    def of(cls, config: TrainConfig) -> Algorithm:
        size, longest = config.rollout.group_size, config.rollout.max_response_tokens
        return cls(config.algorithm, config.ppo, size, longest, Overlong(config.overlong, longest))

    def experience(
        self, scored: ScoredBatch, kl_coefficient: float, check: bool = True, seen: Moments = NOTHING_SEEN
    ) -> Experience:
        """What the update trains on.  Raises as `build_experience` does."""
        return build_experience(scored, self.choices, self.ppo, kl_coefficient, check, seen, self.overlong)

    @property
    def needs_proximal(self) -> bool:
        """Whether an update needs its tokens' log-probs under the weights that it starts from."""
        return self.ppo.staleness == "decoupled"

    @property
    def needs_lengths(self) -> bool:
        """Whether the actor's loss needs to know where responses end."""
        return self.choices.ratio != "token"

    def ratio_base(
        self, behaviour_logp_T: Tensor, proximal_logp_T: Tensor | None, lengths_B: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """What the ratio is taken against, and each token's importance weight (None: 1), both [T]."""
        return ratio_base(behaviour_logp_T, proximal_logp_T, self.ppo.staleness, self.choices.ratio, lengths_B)

    def row_weights(self, lengths_N: Sequence[int], counted_N: Sequence[bool] | None = None) -> list[float]:
        """How much a token of each response of a minibatch counts in the actor's loss; see `reduction`."""
        return row_weights(lengths_N, self.group_size, self.choices.reduction, self.longest, counted_N)

    def actor_loss(
        self, logp_T: Tensor, entropy_T: Tensor, targets: ActorTargets, kl_coefficient: float, num_tokens: int
    ) -> tuple[Tensor, PolicyStats]:
        """The actor's loss of a micro-batch; `num_tokens` is the token count of the global minibatch."""
        surrogate = Surrogate.of(self.choices, self.ppo)
        return actor_loss(logp_T, entropy_T, targets, surrogate, self.ppo, kl_coefficient, num_tokens)

    def critic_loss(
        self, values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, num_tokens: int
    ) -> tuple[Tensor, ValueStats]:
        """The critic's loss of a micro-batch, if a critic is trained."""
        return value_loss(values_T, old_values_T, returns_T, self.ppo.value_clip, num_tokens)
