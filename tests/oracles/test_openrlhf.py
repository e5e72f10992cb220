"""Our losses and advantages against OpenRLHF's `PolicyLoss` and experience maker: `make test-oracles`."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

if importlib.util.find_spec("openrlhf") is None:
    pytest.skip("needs openrlhf, in an environment of its own: make test-oracles", allow_module_level=True)

import torch

from tests.oracles import openrlhf_oracle as openrlhf
from tests.oracles.batches import gradients, samples
from tests.oracles.comparing import advantages_for, assert_close, assert_rows_close, assert_same_loss, cases
from tests.oracles.implementations import Implementation
from tests.replay import formulas
from tests.replay.recipe import PRESETS, Recipe


def preset(name: str, **changes: Any) -> Recipe:
    return Recipe(**{**PRESETS[name], **changes})


LOSSES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "ppo": (Recipe(kl="none"), {}),
    "reinforce_pp": (preset("reinforce_pp", kl_coefficient=0.1), {}),
    "reinforce_pp_baseline": (preset("reinforce_pp_baseline", kl="none"), {}),
    "grpo": (preset("grpo", kl="none"), {"token_level_loss": False}),
    "dapo": (preset("dapo"), {"clip_eps_high": 0.28}),
    "dapo, dual clip": (preset("dapo", dual_clip=1.4), {"clip_eps_high": 0.28, "dual_clip": 1.4}),
    "gspo": (
        preset("gspo", clip_low=0.1, clip_high=0.2),
        {"policy_loss_type": "gspo", "clip_eps_low": 0.1, "clip_eps_high": 0.2},
    ),
}


@cases({name: recipe for name, (recipe, _) in LOSSES.items()})
def test_policy_losses(ours: Implementation, name: str) -> None:
    recipe, options = LOSSES[name]
    for number, each in enumerate(samples()):
        advantages = advantages_for(ours, each, recipe)
        loss = ours.loss(each.new, each.batch.old, None, advantages, each.batch, recipe)
        expected = openrlhf.loss(each.new, each.batch.old, advantages, **options)
        assert_same_loss(loss, expected, each.new, batch=number)


@cases({name: recipe for name, (recipe, _) in LOSSES.items() if recipe.ratio == "token"})
def test_stale_tokens_weigh_as_its_truncated_correction_says(ours: Implementation, name: str) -> None:
    """The ratio against the step's start, times at most the cap."""
    recipe, options = LOSSES[name]
    for number, each in enumerate(samples()):
        advantages = advantages_for(ours, each, recipe)
        behaviour = each.batch.old
        importance = [
            (now - then).exp().clamp(max=recipe.weight_cap) for now, then in zip(each.proximal, behaviour, strict=True)
        ]
        loss = ours.loss(each.new, each.proximal, importance, advantages, each.batch, recipe)
        expected = openrlhf.loss(
            each.new, each.proximal, advantages, behaviour=behaviour, cap=recipe.weight_cap, **options
        )
        assert_same_loss(loss, expected, each.new, batch=number)


KL = {name: Recipe(kl="loss", estimator=name, kl_coefficient=1.0) for name in ("k2", "k3")}


@cases(KL)
def test_kl_in_the_loss(ours: Implementation, name: str) -> None:
    for number, each in enumerate(samples()):
        nothing = [torch.zeros_like(row) for row in each.proximal]
        loss = ours.loss(each.new, each.batch.old, None, nothing, each.batch, KL[name])
        expected = openrlhf.kl_loss(each.new, each.batch.old, each.batch.reference, name, unbiased=False)
        assert_same_loss(loss, expected, each.new, batch=number)


UNBIASED = {"k3": replace(KL["k3"], kl_gradient="ratio")}


@cases(UNBIASED)
def test_gradient_of_the_reverse_kl(ours: Implementation, name: str) -> None:
    """Its unbiased one is that of the estimator times the ratio; what it reports is the estimator alone."""
    for number, each in enumerate(samples()):
        nothing = [torch.zeros_like(row) for row in each.proximal]
        loss = ours.loss(each.new, each.batch.old, None, nothing, each.batch, UNBIASED[name])
        expected = openrlhf.kl_loss(each.new, each.batch.old, each.batch.reference, name, unbiased=True)
        assert_close(gradients(loss, each.new), gradients(expected, each.new), batch=number)


ADVANTAGES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "gae": (Recipe(kl_coefficient=0.1, gamma=0.97, gae_lambda=0.9), {"gamma": 0.97, "lambd": 0.9}),
    "reinforce": (preset("reinforce_pp", kl_coefficient=0.1, gamma=0.9), {"gamma": 0.9}),
    "reinforce_baseline": (preset("reinforce_pp_baseline", kl="penalty", estimator="k1", kl_coefficient=0.1), {}),
    "rloo": (preset("rloo", kl="penalty", kl_coefficient=0.1), {}),
    "group_norm": (preset("grpo", kl="penalty", estimator="k1", kl_coefficient=0.1, std_eps=1e-9), {}),
    "dr_grpo": (preset("dr_grpo", kl="penalty", kl_coefficient=0.1), {}),
}


@cases({name: recipe for name, (recipe, _) in ADVANTAGES.items()})
def test_advantages(ours: Implementation, name: str) -> None:
    """By estimator, each with the KL of every token in its reward, behind the baseline."""
    recipe, options = ADVANTAGES[name]
    for number, each in enumerate(samples()):
        expected = openrlhf.advantages(each, name, kl=recipe.estimator, coefficient=recipe.kl_coefficient, **options)
        assert_rows_close(advantages_for(ours, each, recipe), expected, batch=number)


@pytest.mark.parametrize("clip", [0.1, 0.5])
def test_value_losses(clip: float) -> None:
    for number, each in enumerate(samples()):
        old, returns = each.batch.values, each.batch.reference
        expected = openrlhf.value_loss(each.new, old, returns, clip)
        ours = formulas.critic_loss(each.new, old, returns, Recipe(value_clip=clip))
        assert_same_loss(ours, expected, each.new, batch=number)
