"""Our losses and advantages against those of TRL's `GRPOTrainer` and `RLOOTrainer`: `make test-oracles`."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("trl") is None:
    pytest.skip("needs trl, in an environment of its own: make test-oracles", allow_module_level=True)

import torch

from tests.oracles.batches import LIMIT, sample, samples
from tests.oracles.comparing import advantages_for, assert_rows_close, assert_same_loss, cases
from tests.oracles.implementations import REPLAY, Implementation
from tests.oracles.trl_oracle import grpo_advantages, grpo_loss, rloo_advantages, rloo_loss
from tests.replay.recipe import PRESETS, Recipe

EPS = {"std_eps": 1e-4, "longest": LIMIT}
TOKEN = {"baseline": "group_mean", "scale": "group_std", **EPS}


def preset(name: str, **changes: Any) -> Recipe:
    return Recipe(**{**PRESETS[name], **EPS, **changes})


LOSSES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "grpo without KL": (preset("grpo", kl="none"), {"loss_type": "grpo"}),
    "grpo": (preset("grpo", kl_coefficient=0.04), {"loss_type": "grpo", "beta": 0.04}),
    "grpo, unbiased KL": (
        preset("grpo", kl_coefficient=0.04, kl_gradient="ratio"),
        {"loss_type": "grpo", "beta": 0.04, "bias_correction": True},
    ),
    "dr_grpo": (preset("dr_grpo"), {"loss_type": "dr_grpo"}),
    "dr_grpo, KL": (
        preset("dr_grpo", kl="loss", estimator="k3", kl_coefficient=0.1), {"loss_type": "dr_grpo", "beta": 0.1},
    ),
    "dapo": (preset("dapo"), {"loss_type": "dapo", "high": 0.28}),
    "dapo, dual clip": (preset("dapo", dual_clip=1.5), {"loss_type": "dapo", "high": 0.28, "delta": 1.5}),
    "bnpo, KL": (
        preset("dapo", clip_high=0.2, kl="loss", estimator="k3", kl_coefficient=0.04), {"loss_type": "bnpo", "beta": 0.04},
    ),
    "gspo": (preset("gspo"), {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4}),
    "gspo, wide": (
        preset("gspo", clip_low=0.2, clip_high=0.3),
        {"loss_type": "grpo", "level": "sequence", "low": 0.2, "high": 0.3},
    ),
    "luspo": (
        preset("gspo", clip_low=0.2, clip_high=0.3, reduction="sequence_sum"),
        {"loss_type": "luspo", "level": "sequence", "low": 0.2, "high": 0.3},
    ),
    "cispo": (preset("cispo", cap=1.3), {"loss_type": "cispo", "high": 1.3}),
    "cispo, the usual cap": (preset("cispo"), {"loss_type": "cispo", "high": 5.0}),
    "cispo of sequences": (
        preset("cispo", cap=1.1, ratio="sequence"), {"loss_type": "cispo", "level": "sequence", "high": 1.1},
    ),
    "token mean without a critic": (
        Recipe(baseline="none", scale="whiten", kl="none"), {"loss_type": "dapo"},
    ),
    "token mean without a critic, KL": (
        Recipe(baseline="none", scale="whiten", kl="loss", estimator="k3", kl_coefficient=0.1),
        {"loss_type": "dapo", "beta": 0.1},
    ),
}  # fmt: skip


@cases({name: recipe for name, (recipe, _) in LOSSES.items()})
def test_losses_of_grpos_family(ours: Implementation, name: str) -> None:
    recipe, theirs = LOSSES[name]
    for number, each in enumerate(samples()):
        advantages = advantages_for(ours, each, recipe)
        old = each.batch.old
        loss = ours.loss(each.new, old, None, advantages, each.batch, recipe)
        assert_same_loss(loss, grpo_loss(each, old, advantages, **theirs), each.new, batch=number)


RLOO = {
    "rloo": preset("rloo", kl_coefficient=0.05),
    "rloo, clip-higher": preset("rloo", kl_coefficient=0.05, clip_low=0.1, clip_high=0.4),
}


@cases(RLOO)
def test_loss_of_rloo(ours: Implementation, name: str) -> None:
    recipe = RLOO[name]
    for number, each in enumerate(samples(spread=0.1)):
        advantages = advantages_for(ours, each, recipe)
        loss = ours.loss(each.new, each.batch.old, None, advantages, each.batch, recipe)
        theirs = rloo_loss(each, each.batch.old, advantages, recipe.clip_low, recipe.clip_high)
        assert_same_loss(loss, theirs, each.new, batch=number)


ADVANTAGES = {"group": preset("grpo"), "none": preset("dr_grpo"), "batch": preset("cispo")}


@cases(ADVANTAGES)
def test_advantages_of_grpo(ours: Implementation, name: str) -> None:
    for number, each in enumerate(samples()):
        assert_rows_close(advantages_for(ours, each, ADVANTAGES[name]), grpo_advantages(each, name), batch=number)


RLOO_ADVANTAGES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "no KL": (preset("rloo", kl="none"), {"beta": 0.0}),
    "KL in the row's reward": (preset("rloo", kl_coefficient=0.05), {"beta": 0.05}),
    "normalised": (
        preset("rloo", kl_coefficient=0.05, scale="advantage_std"), {"beta": 0.05, "normalize": True},
    ),
}  # fmt: skip


@cases({name: recipe for name, (recipe, _) in RLOO_ADVANTAGES.items()})
def test_advantages_of_rloo(ours: Implementation, name: str) -> None:
    recipe, theirs = RLOO_ADVANTAGES[name]
    for number, each in enumerate(samples()):
        assert_rows_close(advantages_for(ours, each, recipe), rloo_advantages(each, **theirs), batch=number)


def test_a_group_of_equal_rewards_has_no_advantage_here_and_rounding_there() -> None:
    """Eight rewards of 0.7, whose mean is not 0.7 in float32: why ours are decided by the largest and the smallest."""
    each = sample(0, 0.4, grouped=True)
    scores_B = torch.full((8,), 0.7)
    rows = [each.batch.old[0]] * 8
    batch = type(each.batch)(scores_B, [0] * 8, [False] * 8, rows, rows)
    equal = type(each)(batch, rows, rows, 8)
    theirs = torch.cat(grpo_advantages(equal, "group"))
    assert theirs.abs().max() > 1e-4
    for name in ("grpo", "dr_grpo", "rloo", "cispo", "magistral"):
        assert not torch.cat(advantages_for(REPLAY, equal, preset(name, kl="none"))).any(), name


def test_a_dual_clip_below_the_clip_binds_good_tokens_there_and_none_here() -> None:
    """`delta` holds every ratio, of a positive advantage too: it is a dual clip where it is above 1 + epsilon."""
    recipe, high = preset("dapo", dual_clip=1.1, clip_high=0.5), {"low": 0.2, "high": 0.5}
    differs = 0
    for each in samples(count=10):
        good = [torch.ones_like(row) for row in each.proximal]
        ours = REPLAY.loss(each.new, each.batch.old, None, good, each.batch, recipe)
        plain = grpo_loss(each, each.batch.old, good, "dapo", **high)
        assert_same_loss(ours, plain, each.new)
        differs += bool((grpo_loss(each, each.batch.old, good, "dapo", delta=1.1, **high) - plain).abs() > 1e-3)
    assert differs
