"""What is compared with the oracles: the replay's formulas, and the product's functions as far as it has the recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_megatron.algorithms.algorithm import make_algorithm
from oppo_megatron.algorithms.experience import ScoredBatch
from oppo_megatron.algorithms.losses import ActorTargets
from oppo_megatron.config.ppo import AlgorithmConfig, KLConfig, PPOConfig
from tests.replay import formulas
from tests.replay.formulas import Batch, Rows
from tests.replay.recipe import Recipe


@dataclass(frozen=True)
class Implementation:
    """`advantages(batch, recipe)`: of each token.  `loss(new, old, importance, advantages, batch, recipe)`: of a minibatch.

    `has` tells whether it can make the recipe.
    """

    name: str
    has: Callable[[Recipe], bool]
    advantages: Callable[[Batch, Recipe], Rows]
    loss: Callable[[Rows, Rows, Rows | None, Rows, Batch, Recipe], Tensor]


def _replay_advantages(batch: Batch, recipe: Recipe) -> Rows:
    return formulas.advantages_of(batch, batch.scores_B, recipe, recipe.kl_coefficient)[0]


def _replay_loss(
    new: Rows, old: Rows, importance: Rows | None, advantages: Rows, batch: Batch, recipe: Recipe
) -> Tensor:
    nothing = [torch.zeros_like(row) for row in new]
    return formulas.actor_loss(
        new, nothing, old, importance, advantages, batch.reference, batch.groups, recipe, recipe.kl_coefficient
    )


def _product_has(recipe: Recipe) -> bool:
    kl = recipe.kl in ("none", "penalty") or (
        recipe.kl == "loss" and recipe.estimator != "k1" and recipe.kl_gradient == "estimator"
    )
    return (
        recipe.baseline in ("critic", "none")
        and recipe.scale in ("none", "whiten")
        and (recipe.ratio, recipe.objective, recipe.reduction) == ("token", "clip", "token_mean")
        and (recipe.clip_low, recipe.dual_clip) == (recipe.clip_high, None)
        and kl
    )


def _settings(recipe: Recipe) -> PPOConfig:
    return PPOConfig(
        gamma=recipe.gamma,
        gae_lambda=recipe.gae_lambda,
        clip=recipe.clip_low,
        whiten_advantages=recipe.scale == "whiten",
        kl=KLConfig(
            estimator=recipe.estimator,
            mode="loss" if recipe.kl == "loss" else "penalty",
            coefficient=0.0 if recipe.kl == "none" else recipe.kl_coefficient,
        ),
    )


def _product_advantages(batch: Batch, recipe: Recipe) -> Rows:
    preset = "ppo" if recipe.baseline == "critic" else "reinforce_pp"
    algorithm = make_algorithm(AlgorithmConfig(preset=preset), _settings(recipe))
    scored = ScoredBatch(
        behaviour_logp_T=_packed(batch.old),
        reference_logp_T=_packed(batch.reference),
        values_T=None if recipe.baseline == "none" or batch.values is None else _packed(batch.values),
        scores_B=batch.scores_B,
        lengths_B=batch.lengths,
        truncated_B=torch.tensor(batch.cut),
    )
    coefficient = 0.0 if recipe.kl == "none" else recipe.kl_coefficient
    return algorithm.experience(scored, coefficient).advantages_T.split(batch.lengths)


def _product_loss(
    new: Rows, old: Rows, importance: Rows | None, advantages: Rows, batch: Batch, recipe: Recipe
) -> Tensor:
    algorithm = make_algorithm(AlgorithmConfig(preset="ppo"), _settings(recipe))
    targets = ActorTargets(
        old_logp_T=_packed(old),
        advantages_T=_packed(advantages),
        reference_logp_T=_packed(batch.reference),
        weight_T=None if importance is None else _packed(importance),
    )
    new_T = _packed(new)
    coefficient = recipe.kl_coefficient if recipe.kl == "loss" else 0.0
    loss, _ = algorithm.actor_loss(new_T, torch.zeros_like(new_T), targets, coefficient, new_T.numel())
    return loss


def _packed(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(rows))


REPLAY = Implementation("replay", lambda recipe: True, _replay_advantages, _replay_loss)
PRODUCT = Implementation("oppo_megatron", _product_has, _product_advantages, _product_loss)
IMPLEMENTATIONS = (REPLAY, PRODUCT)
