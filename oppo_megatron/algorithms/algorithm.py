"""The algorithm as the training loop sees it.  T: response tokens, B: responses, N: responses of a minibatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from oppo_megatron.algorithms.advantages import NOTHING_SEEN, Moments
from oppo_megatron.algorithms.custom import CustomAdvantage, CustomLoss
from oppo_megatron.algorithms.experience import Experience, ScoredBatch, build_experience, with_pairs
from oppo_megatron.algorithms.losses import (
    BOUND_FIGURES,
    POLICY_FIGURES,
    ActorTargets,
    Surrogate,
    ValueStats,
    actor_loss,
    policy_figures,
    ratio_base,
    row_weights,
    value_loss,
)
from oppo_megatron.algorithms.packed import TokenStats, token_noise
from oppo_megatron.algorithms.supervised_losses import PAIR_FIGURES, pair_figures, pair_loss, pair_weights
from oppo_megatron.config.algorithm import AlgorithmConfig
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import DPOLossConfig
from oppo_megatron.plugins import Plugin


@dataclass(frozen=True)
class Algorithm:
    choices: AlgorithmConfig
    ppo: PPOConfig
    group_size: int
    longest: int  # limit of a response, in tokens
    drawn_at: float = 1.0  # sampling temperature
    dpo: DPOLossConfig | None = None  # the loss of pairs; None: a loss of tokens
    dtype: str = "float32"  # the actor's
    advantage: CustomAdvantage | None = None
    loss: CustomLoss | None = None

    @classmethod
    def of(cls, config: TrainConfig) -> Algorithm:
        rollout, longest = config.rollout, config.rollout.max_response_tokens
        drawn_at, dtype = rollout.temperature, config.actor.dtype
        pair = None if config.dpo is None else DPOLossConfig.model_validate(config.dpo.model_dump())
        choices, advantage, loss = config.algorithm, None, None
        if choices.advantage is not None:
            advantage = CustomAdvantage(Plugin.load("algorithm.advantage", choices.advantage))
        if choices.loss is not None:
            plugin = Plugin.load("algorithm.loss", choices.loss)
            loss = CustomLoss(plugin, mean=choices.reduction == "sequence_mean")
        return cls(choices, config.ppo, rollout.group_size, longest, drawn_at, pair, dtype, advantage, loss)

    def experience(
        self, scored: ScoredBatch, kl_coefficient: float, check: bool = True, seen: Moments = NOTHING_SEEN
    ) -> Experience:
        made = build_experience(scored, self.choices, self.ppo, kl_coefficient, check, seen, self.advantage)
        return with_pairs(made, scored, knows_kl=self.drawn_at == 1) if self.choices.pairs else made

    @property
    def needs_lengths(self) -> bool:
        return self.choices.ratio != "token" or self.choices.pairs or self.loss is not None

    @property
    def reads_known(self) -> bool:
        """True if an update's rows are known before the scores."""
        return not self.choices.pairs or self.group_size == 2

    def units(self, rows: Sequence[int], experience: Experience | None = None) -> list[list[int]]:
        """Rows to read, in units that share a micro-batch; `experience` may be None if `reads_known`."""
        if not self.choices.pairs:
            return [[row] for row in rows]
        groups = [row // self.group_size for row in rows[:: self.group_size]]
        if self.group_size == 2:
            return [[2 * group, 2 * group + 1] for group in groups]
        assert experience is not None and experience.pairs is not None
        return [experience.pairs[group] for group in groups]

    def ratio_base(
        self, behaviour_logp_T: Tensor, proximal_logp_T: Tensor | None, advantages_T: Tensor, lengths_B: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Base log-probs and importance weights (None: 1), both [T]."""
        base_T, weight_T = ratio_base(behaviour_logp_T, proximal_logp_T, advantages_T, lengths_B, self.ppo, self.choices.ratio)
        return base_T, weight_T if self.loss is None else None  # a custom loss weights its tokens itself

    def row_weights(self, lengths_N: Sequence[int], counted_N: Sequence[bool] | None = None) -> list[float]:
        if self.choices.reduction == "pair_mean":
            assert counted_N is not None, "pairs are known by the rows that count"
            return pair_weights(sum(lengths_N), counted_N)
        return row_weights(lengths_N, self.group_size, self.choices.reduction, self.longest, counted_N)

    def actor_loss(
        self, logp_T: Tensor, entropy_T: Tensor, targets: ActorTargets, kl_coefficient: float, num_tokens: int
    ) -> tuple[Tensor, TokenStats]:
        """Return a micro-batch's loss and statistics; `num_tokens`: response tokens of the global minibatch."""
        if self.dpo is not None:
            return pair_loss(logp_T, entropy_T, targets, self.dpo, num_tokens, token_noise(self.dtype))
        surrogate = Surrogate.of(self.choices, self.ppo, self.loss)
        return actor_loss(logp_T, entropy_T, targets, surrogate, self.ppo, kl_coefficient, num_tokens)

    @property
    def figure_names(self) -> tuple[str, ...]:
        if self.choices.pairs:
            return PAIR_FIGURES
        return POLICY_FIGURES if self.loss is None else tuple(x for x in POLICY_FIGURES if x not in BOUND_FIGURES)

    def figures(self, reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
        figures = pair_figures(reports) if self.choices.pairs else policy_figures(reports)
        return {name: figures[name] for name in self.figure_names}

    def critic_loss(
        self, values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, num_tokens: int
    ) -> tuple[Tensor, ValueStats]:
        return value_loss(values_T, old_values_T, returns_T, self.ppo.value_clip, num_tokens)
