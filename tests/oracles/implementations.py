"""Implementations that are compared with the oracles: the replay's formulas, and the product's functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from oppo_megatron.algorithms import experience
from oppo_megatron.algorithms.advantages import compared
from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import GreedyRows, ScoredBatch
from oppo_megatron.algorithms.losses import ActorTargets
from oppo_megatron.config.algorithm import AlgorithmConfig
from oppo_megatron.config.ppo import KLConfig, PPOConfig
from tests.replay import formulas
from tests.replay.formulas import Batch, Rows
from tests.replay.recipe import Recipe


@dataclass(frozen=True)
class Implementation:
    """`advantages` of each token and the `loss` of a minibatch by one implementation; `has`: it can make the recipe."""

    name: str
    has: Callable[[Recipe], bool]
    advantages: Callable[[Batch, Recipe], Rows]
    loss: Callable[[Rows, Rows, Rows | None, Rows, Batch, Recipe], Tensor]


def _replay_advantages(batch: Batch, recipe: Recipe) -> Rows:
    greedy = {prompt: score for prompt, (score, _) in batch.greedy.items()}
    return formulas.advantages_of(batch, batch.scores_B, greedy, recipe, recipe.kl_coefficient)[0]


def _replay_loss(new: Rows, old: Rows, importance: Rows | None, advantages: Rows, batch: Batch, recipe: Recipe) -> Tensor:
    nothing = [torch.zeros_like(row) for row in new]
    return formulas.actor_loss(
        new, nothing, old, importance, advantages, batch.reference, batch.groups, recipe, recipe.kl_coefficient
    )


def _product_has(recipe: Recipe) -> bool:
    """True but for a KL whose gradient is another's: d times that of the log-prob, with the estimate for its value."""
    return recipe.kl_gradient != "reverse"


def _algorithm(recipe: Recipe, batch: Batch) -> Algorithm:
    choices = AlgorithmConfig(
        preset="ppo" if recipe.baseline == "critic" else "grpo",
        **{name: getattr(recipe, name) for name in ("baseline", "scale", "ratio", "objective", "reduction")},
    )
    ppo = PPOConfig(
        gamma=recipe.gamma,
        gae_lambda=recipe.gae_lambda,
        clip=recipe.clip_low,
        clip_high=recipe.cap - 1 if choices.objective == "cispo" else recipe.clip_high,
        dual_clip=recipe.dual_clip,
        kl=KLConfig(
            mode=recipe.kl,
            estimator=f"{recipe.estimator}+" if recipe.kl_gradient == "ratio" else recipe.estimator,
            coefficient=recipe.kl_coefficient,
        ),
    )
    return Algorithm(choices, ppo, group_size=batch.groups.count(batch.groups[0]), longest=recipe.longest)


def _product_advantages(batch: Batch, recipe: Recipe) -> Rows:
    algorithm = _algorithm(recipe, batch)
    scored = ScoredBatch(
        behaviour_logp_T=_packed(batch.old),
        reference_logp_T=None if recipe.kl == "none" else _packed(batch.reference),
        values_T=None if recipe.baseline != "critic" or batch.values is None else _packed(batch.values),
        scores_B=batch.scores_B,
        lengths_B=batch.lengths,
        truncated_B=torch.tensor(batch.cut),
        group_size=algorithm.group_size,
        greedy=_greedy(batch) if recipe.baseline == "greedy" else None,
    )
    # What is added to a deviation differs from one implementation to the next (ours is TRL's).
    with mock.patch.object(experience, "compared", partial(compared, eps=recipe.std_eps)):
        return algorithm.experience(scored, recipe.kl_coefficient).advantages_T.split(batch.lengths)


def _greedy(batch: Batch) -> GreedyRows:
    scores, cut = zip(*(batch.greedy[prompt] for prompt in dict.fromkeys(batch.groups)), strict=True)
    return GreedyRows(torch.tensor(scores), torch.ones(len(scores), dtype=torch.int64), torch.tensor(cut))


def _product_loss(new: Rows, old: Rows, importance: Rows | None, advantages: Rows, batch: Batch, recipe: Recipe) -> Tensor:
    algorithm, new_T = _algorithm(recipe, batch), _packed(new)
    weights = [torch.full((n,), w) for n, w in zip(batch.lengths, algorithm.row_weights(batch.lengths), strict=True)]
    targets = ActorTargets(
        old_logp_T=_packed(old),
        advantages_T=_packed(advantages),
        reference_logp_T=None if recipe.kl == "none" else _packed(batch.reference),
        weight_T=None if importance is None else _packed(importance),
        share_T=_packed(weights),
        lengths_R=torch.tensor(batch.lengths),
    )
    loss, _ = algorithm.actor_loss(new_T, torch.zeros_like(new_T), targets, recipe.kl_coefficient, new_T.numel())
    return loss


def _packed(rows: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(rows))


REPLAY = Implementation("replay", lambda recipe: True, _replay_advantages, _replay_loss)
PRODUCT = Implementation("oppo_megatron", _product_has, _product_advantages, _product_loss)
IMPLEMENTATIONS = (REPLAY, PRODUCT)
