"""Our losses and advantages against TRL's trainers and verl's `core_algos.py`: `make test-oracles`."""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

if importlib.util.find_spec("trl") is None or importlib.util.find_spec("verl") is None:
    pytest.skip("needs trl and verl, in an environment of their own: make test-oracles", allow_module_level=True)

import torch
from torch import Tensor

from oppo_megatron.algorithms.losses import value_loss
from tests.oracles import trl_oracle as trl
from tests.oracles import verl_oracle as verl
from tests.oracles.comparing import (
    LIMIT,
    REPLAY,
    Implementation,
    Sample,
    advantages_for,
    assert_close,
    assert_rows_close,
    assert_same_loss,
    cases,
    gradients,
    sample,
    samples,
)
from tests.oracles.trl_oracle import grpo_advantages, grpo_loss
from tests.replay import formulas
from tests.replay.formulas import Rows
from tests.replay.recipe import PRESETS, Recipe

OFF = 1e9
AGGREGATIONS = {
    "token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean", "sequence_sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}  # fmt: skip


def preset(name: str, **changes: Any) -> Recipe:
    return Recipe(**{**PRESETS[name], "longest": LIMIT, **changes})


def trls(name: str, **changes: Any) -> Recipe:
    return preset(name, std_eps=1e-4, **changes)


TRL_LOSSES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "grpo without KL": (trls("grpo", kl="none"), {"loss_type": "grpo"}),
    "grpo": (trls("grpo", kl_coefficient=0.04), {"loss_type": "grpo", "beta": 0.04}),
    "grpo, unbiased KL": (trls("grpo", kl_coefficient=0.04, kl_gradient="ratio"),
        {"loss_type": "grpo", "beta": 0.04, "bias_correction": True}),
    "dr_grpo": (trls("dr_grpo"), {"loss_type": "dr_grpo"}),
    "dr_grpo, KL": (trls("dr_grpo", kl="loss", estimator="k3", kl_coefficient=0.1), {"loss_type": "dr_grpo", "beta": 0.1}),
    "dapo": (trls("dapo"), {"loss_type": "dapo", "high": 0.28}),
    "dapo, dual clip": (trls("dapo", dual_clip=1.5), {"loss_type": "dapo", "high": 0.28, "delta": 1.5}),
    "bnpo, KL": (trls("dapo", clip_high=0.2, kl="loss", estimator="k3", kl_coefficient=0.04),
        {"loss_type": "bnpo", "beta": 0.04}),
    "gspo": (trls("gspo"), {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4}),
    "gspo, wide": (trls("gspo", clip_low=0.2, clip_high=0.3),
        {"loss_type": "grpo", "level": "sequence", "low": 0.2, "high": 0.3}),
    "luspo": (trls("gspo", clip_low=0.2, clip_high=0.3, reduction="sequence_sum"),
        {"loss_type": "luspo", "level": "sequence", "low": 0.2, "high": 0.3}),
    "cispo": (trls("cispo", cap=1.3), {"loss_type": "cispo", "high": 1.3}),
    "cispo, the usual cap": (trls("cispo"), {"loss_type": "cispo", "high": 5.0}),
    "cispo of sequences": (trls("cispo", cap=1.1, ratio="sequence"), {"loss_type": "cispo", "level": "sequence", "high": 1.1}),
    "token mean without a critic": (Recipe(baseline="none", scale="whiten", kl="none"), {"loss_type": "dapo"}),
    "token mean without a critic, KL": (Recipe(baseline="none", scale="whiten", kl="loss", estimator="k3", kl_coefficient=0.1),
        {"loss_type": "dapo", "beta": 0.1}),
}  # fmt: skip


@cases({name: recipe for name, (recipe, _) in TRL_LOSSES.items()})
def test_losses_of_grpos_family(ours: Implementation, name: str) -> None:
    recipe, theirs = TRL_LOSSES[name]
    for number, each in enumerate(samples()):
        advantages = advantages_for(ours, each, recipe)
        old = each.batch.old
        loss = ours.loss(each.new, old, None, advantages, each.batch, recipe)
        assert_same_loss(loss, grpo_loss(each, old, advantages, **theirs), each.new, batch=number)


RLOO = {
    "rloo": trls("rloo", kl_coefficient=0.05),
    "rloo, clip-higher": trls("rloo", kl_coefficient=0.05, clip_low=0.1, clip_high=0.4),
}


@cases(RLOO)
def test_loss_of_rloo(ours: Implementation, name: str) -> None:
    recipe = RLOO[name]
    for number, each in enumerate(samples(spread=0.1)):
        advantages = advantages_for(ours, each, recipe)
        loss = ours.loss(each.new, each.batch.old, None, advantages, each.batch, recipe)
        theirs = trl.rloo_loss(each, each.batch.old, advantages, recipe.clip_low, recipe.clip_high)
        assert_same_loss(loss, theirs, each.new, batch=number)


TRL_ADVANTAGES = {"group": trls("grpo"), "none": trls("dr_grpo"), "batch": trls("cispo")}


@cases(TRL_ADVANTAGES)
def test_advantages_of_grpo(ours: Implementation, name: str) -> None:
    for number, each in enumerate(samples()):
        assert_rows_close(advantages_for(ours, each, TRL_ADVANTAGES[name]), grpo_advantages(each, name), batch=number)


RLOO_ADVANTAGES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "no KL": (trls("rloo", kl="none"), {"beta": 0.0}),
    "KL in the row's reward": (trls("rloo", kl_coefficient=0.05), {"beta": 0.05}),
    "normalised": (trls("rloo", kl_coefficient=0.05, scale="advantage_std"), {"beta": 0.05, "normalize": True}),
}  # fmt: skip


@cases({name: recipe for name, (recipe, _) in RLOO_ADVANTAGES.items()})
def test_advantages_of_rloo(ours: Implementation, name: str) -> None:
    recipe, theirs = RLOO_ADVANTAGES[name]
    for number, each in enumerate(samples()):
        assert_rows_close(advantages_for(ours, each, recipe), trl.rloo_advantages(each, **theirs), batch=number)


def test_a_group_of_equal_rewards_has_no_advantage_here_and_rounding_there() -> None:
    """Eight rewards of 0.7, whose mean is not 0.7 in float32: why ours are decided by the largest and the smallest."""
    each = sample(0, 0.4, grouped=True)
    scores_B = torch.full((8,), 0.7)
    rows = [each.batch.old[0]] * 8
    equal = type(each)(type(each.batch)(scores_B, [0] * 8, [False] * 8, rows, rows), rows, rows, 8)
    theirs = torch.cat(grpo_advantages(equal, "group"))
    assert theirs.abs().max() > 1e-4
    for name in ("grpo", "dr_grpo", "rloo", "cispo", "magistral"):
        assert not torch.cat(advantages_for(REPLAY, equal, trls(name, kl="none"))).any(), name


def test_a_dual_clip_below_the_clip_binds_good_tokens_there_and_none_here() -> None:
    """`delta` holds every ratio, of a positive advantage too: it is a dual clip where it is above 1 + epsilon."""
    recipe, high = trls("dapo", dual_clip=1.1, clip_high=0.5), {"low": 0.2, "high": 0.5}
    differs = 0
    for each in samples(count=10):
        good = [torch.ones_like(row) for row in each.proximal]
        ours = REPLAY.loss(each.new, each.batch.old, None, good, each.batch, recipe)
        plain = grpo_loss(each, each.batch.old, good, "dapo", **high)
        assert_same_loss(ours, plain, each.new)
        differs += bool((grpo_loss(each, each.batch.old, good, "dapo", delta=1.1, **high) - plain).abs() > 1e-3)
    assert differs


# verl


def importance_of(each: Sample, recipe: Recipe) -> list[Tensor]:
    return [(now - then).exp().clamp(max=recipe.weight_cap) for now, then in zip(each.proximal, each.batch.old, strict=True)]


VERL_LOSSES: dict[str, tuple[Recipe, str, dict[str, float]]] = {
    "grpo": (preset("grpo", kl="none"), "vanilla", {}),
    "grpo, dual clip": (preset("grpo", kl="none", dual_clip=1.5), "vanilla", {"clip_ratio_c": 1.5}),
    "dr_grpo": (preset("dr_grpo"), "vanilla", {}), "dapo": (preset("dapo"), "vanilla", {"clip_ratio_high": 0.28}),
    "dapo, dual clip": (preset("dapo", dual_clip=1.3), "vanilla", {"clip_ratio_high": 0.28, "clip_ratio_c": 1.3}),
    "clip by sequence sums": (preset("dapo", reduction="sequence_sum", clip_high=0.2), "vanilla", {}),
    "gspo": (preset("gspo"), "gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "gspo, wide": (preset("gspo", clip_low=0.1, clip_high=0.2), "gspo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}),
    "gspo by tokens": (preset("gspo_token", clip_low=0.1, clip_high=0.2), "gspo",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}),
    "gspo, token mean": (preset("gspo", clip_low=0.1, clip_high=0.2, reduction="token_mean"), "gspo",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}),
    "cispo": (preset("cispo", cap=1.3), "cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.3}),
    "ppo": (Recipe(kl="none"), "vanilla", {}), "reinforce_pp": (preset("reinforce_pp", kl_coefficient=0.1), "vanilla", {}),
}  # fmt: skip


@cases({name: recipe for name, (recipe, _, _) in VERL_LOSSES.items()})
def test_policy_losses(ours: Implementation, name: str) -> None:
    for number, each in enumerate(samples()):
        assert_verls(ours, name, each, each.batch.old, None, batch=number)


@cases({name: recipe for name, (recipe, _, _) in VERL_LOSSES.items() if recipe.ratio != "sequence"})
def test_policy_losses_of_stale_tokens(ours: Implementation, name: str) -> None:
    """Includes weights of stale tokens; not sequence ratios, for which verl's gradients differ (`sequence_token`)."""
    for number, each in enumerate(samples()):
        importance = importance_of(each, VERL_LOSSES[name][0])
        assert_verls(ours, name, each, each.proximal, importance, batch=number)


def assert_verls(ours: Implementation, name: str, each: Sample, old: Rows, importance: Rows | None, **about: int) -> None:
    recipe, theirs, clip = VERL_LOSSES[name]
    advantages = advantages_for(ours, each, recipe)
    loss = ours.loss(each.new, old, importance, advantages, each.batch, recipe)
    config = verl.ActorConfig(**{"clip_ratio_c": OFF, **clip})
    if recipe.reduction == "constant":
        config.global_batch_info = {"loss_scale_factor": LIMIT}
    expected = verl.loss(theirs, each.new, old, advantages, AGGREGATIONS[recipe.reduction], importance, config)
    assert_same_loss(loss, expected, each.new, **about)


VERL_ADVANTAGES: dict[str, tuple[Recipe, str, dict[str, Any]]] = {
    "grpo": (preset("grpo"), "grpo", {}), "grpo without std": (preset("dr_grpo"), "grpo", {"norm_adv_by_std_in_grpo": False}),
    "rloo": (preset("rloo", kl="none"), "rloo", {}),
    "rloo, KL in the row's reward": (preset("rloo"), "rloo", {"kl": "k1", "coefficient": 0.05}),
    "reinforce_pp_baseline": (preset("reinforce_pp_baseline"), "reinforce_plus_plus_baseline", {}),
    "reinforce_pp": (preset("reinforce_pp", kl="none", gamma=0.9), "reinforce_plus_plus", {"config": verl.AlgoConfig(0.9)}),
    "reinforce_pp, KL penalty": (preset("reinforce_pp", kl_coefficient=0.1, estimator="k3"), "reinforce_plus_plus",
        {"config": verl.AlgoConfig(1.0), "kl": "k3", "coefficient": 0.1}),
    "remax": (preset("remax", kl="none"), "remax", {}),
    "remax, KL penalty": (preset("remax", kl_coefficient=0.1), "remax", {"kl": "k1", "coefficient": 0.1}),
    "gae": (Recipe(kl="none", gamma=0.97, gae_lambda=0.9), "gae", {"gamma": 0.97, "lam": 0.9}),
    "gae, KL penalty": (Recipe(kl_coefficient=0.1), "gae", {"gamma": 1.0, "lam": 0.95, "kl": "k1", "coefficient": 0.1}),
}  # fmt: skip


@cases({name: recipe for name, (recipe, _, _) in VERL_ADVANTAGES.items()})
def test_advantages(ours: Implementation, name: str) -> None:
    """Whitened ones but for the variance, which verl divides by one token less."""
    recipe, theirs, options = VERL_ADVANTAGES[name]
    for number, each in enumerate(samples()):
        expected = verl.advantages(each, theirs, **options)
        if recipe.scale == "whiten":
            tokens = sum(each.lengths)
            expected = [row * (tokens / (tokens - 1)) ** 0.5 for row in expected]
        assert_rows_close(advantages_for(ours, each, recipe), expected, batch=number)


def test_a_group_of_one_has_no_advantage_here_and_its_reward_there() -> None:
    """verl takes 0 for the mean of one reward, and 1 for its deviation."""
    for each in samples(grouped=False, count=5):
        theirs = verl.advantages(each, "rloo")
        assert_rows_close(theirs, [each.batch.scores_B[row].expand(len(old)) for row, old in enumerate(each.batch.old)])
        assert_rows_close(verl.advantages(each, "grpo"), theirs)
        assert not torch.cat(advantages_for(REPLAY, each, preset("grpo"))).any()


@pytest.mark.parametrize("reduction", AGGREGATIONS)
def test_reductions(reduction: str) -> None:
    recipe = Recipe(reduction=reduction, longest=LIMIT)
    for each in samples():
        weights = formulas.token_weights(each.lengths, each.batch.groups, recipe)
        ours = sum(weight * row.sum() for weight, row in zip(weights, each.new, strict=True))
        options = {"loss_scale_factor": LIMIT} if reduction == "constant" else {}
        assert_close(ours, verl.aggregated(each.new, AGGREGATIONS[reduction], **options))


def test_reduction_by_groups_is_the_mean_of_verls_over_each_group() -> None:
    recipe = Recipe(reduction="group_token_mean")
    for each in samples():
        weights = formulas.token_weights(each.lengths, each.batch.groups, recipe)
        ours = sum(weight * row.sum() for weight, row in zip(weights, each.new, strict=True))
        parts = [
            verl.aggregated([each.new[row] for row in members], "token-mean")
            for members in formulas.members_of(each.batch.groups)
        ]
        assert_close(ours, torch.stack(parts).mean())


KL: dict[str, tuple[Recipe, str]] = {
    "k2": (Recipe(kl="loss", estimator="k2"), "k2"), "k3": (Recipe(kl="loss", estimator="k3"), "low_var_kl"),
    "k3 by sequences": (Recipe(kl="loss", estimator="k3", reduction="sequence_mean"), "k3"),
    "k1, reverse": (Recipe(kl="loss", estimator="k1", kl_gradient="reverse"), "k1+"),
    "k3, reverse": (Recipe(kl="loss", estimator="k3", kl_gradient="reverse"), "k3+"),
}  # fmt: skip


@cases({name: recipe for name, (recipe, _) in KL.items()})
def test_kl_in_the_loss(ours: Implementation, name: str) -> None:
    recipe, kind = KL[name]
    for number, each in enumerate(samples()):
        nothing = [torch.zeros_like(row) for row in each.proximal]
        loss = ours.loss(each.new, each.batch.old, None, nothing, each.batch, replace(recipe, kl_coefficient=1.0))
        expected = verl.kl_loss(each.new, each.batch.reference, kind, AGGREGATIONS[recipe.reduction])
        assert_same_loss(loss, expected, each.new, batch=number)


@pytest.mark.parametrize("clip", [0.1, 0.5])
def test_value_losses(clip: float) -> None:
    recipe = Recipe(value_clip=clip)
    for number, each in enumerate(samples()):
        old, returns = each.batch.values, each.batch.reference
        expected = verl.value_loss(each.new, old, returns, clip)
        assert_same_loss(formulas.critic_loss(each.new, old, returns, recipe), expected, each.new, batch=number)
        packed, tokens = torch.cat(each.new), sum(each.lengths)
        loss, _ = value_loss(packed, torch.cat(old), torch.cat(returns), clip, tokens)
        assert_close(gradients(loss, each.new), gradients(verl.value_loss(each.new, old, returns, clip), each.new))
