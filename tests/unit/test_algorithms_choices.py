"""The choices of an algorithm against plain loops and enumeration: baselines, scales, ratios, objectives, weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oppo_megatron.algorithms.advantages import DEVIATION_EPS, compared, equal_groups
from oppo_megatron.algorithms.losses import ActorTargets, Surrogate, kl_per_token, policy_loss, ratio_base, with_reverse_gradient
from oppo_megatron.config.algorithm import Baseline, Objective, Ratio, Scale
from tests.replay.formulas import kl_of, less_baseline, row_losses, row_ratio, scaled
from tests.replay.recipe import Recipe

DOUBLE = torch.float64
LENGTHS = [3, 1, 4, 2, 6, 1]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


@pytest.mark.parametrize("scale", get_args(Scale))
@pytest.mark.parametrize("baseline", get_args(Baseline))
def test_scores_are_compared_as_plain_loops_do(baseline: Baseline, scale: Scale) -> None:
    scores_B = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 1.5, 1.25, -3.0, 0.0, 0.0, 0.0, 1.0], dtype=DOUBLE)
    groups, greedy = [0] * 4 + [1] * 4 + [2] * 4, {0: 0.25, 1: -2.0, 2: 1.0}
    greedy_G = torch.tensor(list(greedy.values()), dtype=DOUBLE) if baseline == "greedy" else None
    recipe = Recipe(baseline=baseline, scale=scale, std_eps=DEVIATION_EPS)
    expected_B = scaled(less_baseline(scores_B, groups, recipe, greedy), scores_B, groups, recipe)
    torch.testing.assert_close(compared(scores_B, 4, baseline, scale, greedy_G), expected_B)


@pytest.mark.parametrize("score", [0.1, 0.7, 1 / 3, -5e7])
@pytest.mark.parametrize("size", [2, 3, 8, 17])
@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std"])
@pytest.mark.parametrize("baseline", ["group_mean", "others", "best_worst"])
def test_a_group_of_equal_scores_has_no_advantage_at_all(baseline: Baseline, scale: Scale, size: int, score: float) -> None:
    """Their mean, or deviation, may be off by a rounding, which a division by a small deviation would blow up."""
    equal_B, other_B = torch.full((size,), score), torch.arange(size).float()
    scores_B = torch.cat([equal_B, other_B])
    advantages_B = compared(scores_B, size, baseline, scale)
    assert advantages_B[:size].tolist() == [0.0] * size and bool((advantages_B[size:] != 0).any())
    assert equal_groups(scores_B, size).tolist() == [True, False]


SURROGATES = {
    "clip": Surrogate(0.2), "clip-higher": Surrogate(0.2, clip_high=0.5), "dual clip": Surrogate(0.2, dual_clip=1.3),
    "cispo": Surrogate(0.2, ratio_cap=1.1, objective="cispo"), "plain": Surrogate(0.2, objective="plain"),
}  # fmt: skip


@pytest.mark.parametrize("ratio", get_args(Ratio))
@pytest.mark.parametrize("name", SURROGATES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_surrogate_equals_plain_loops_over_rows(name: str, ratio: Ratio, seed: int) -> None:
    """With its gradient and statistics."""
    surrogate = replace(SURROGATES[name], ratio=ratio)
    recipe = Recipe(
        ratio=ratio, objective=surrogate.objective, clip_high=surrogate.clip_high or 0.2, dual_clip=surrogate.dual_clip,
        cap=surrogate.ratio_cap or 5.0,
    )  # fmt: skip
    logp_T, noise_T, advantages_T, share_T, weight_T = randn(5, sum(LENGTHS), seed=seed)
    old_T, share_T, weight_T = logp_T + 0.4 * noise_T, share_T.exp(), weight_T.exp()
    logp_T.requires_grad_()
    targets = ActorTargets(old_T, advantages_T, weight_T=weight_T, share_T=share_T, lengths_R=torch.tensor(LENGTHS))
    loss, stats = policy_loss(logp_T, targets, surrogate, 40)
    rows = list(zip(*(x_T.split(LENGTHS) for x_T in (logp_T, old_T, advantages_T)), strict=True))
    expected = (torch.cat([row_losses(*row, recipe) for row in rows]) * share_T * weight_T).sum()
    torch.testing.assert_close(loss, expected / 40)
    gradients = [torch.autograd.grad(x, logp_T)[0] for x in (loss, expected / 40)]
    torch.testing.assert_close(*gradients)
    ratio_T = torch.cat([row_ratio(new, old, recipe) for new, old, _ in rows])
    kl = float(kl_of(old_T, logp_T, "k3").sum())
    found = [float(getattr(stats, name)) for name in ("num_tokens", "loss", "ratio", "max_ratio", "weight", "approx_kl")]
    due = [sum(LENGTHS), float(expected), float(ratio_T.sum()), float(ratio_T.max()), float(weight_T.sum()), kl]
    assert found == pytest.approx(due, rel=1e-9)


@pytest.mark.parametrize("ratio", get_args(Ratio))
@pytest.mark.parametrize("objective", get_args(Objective))
def test_on_policy_every_ratio_has_the_policy_gradient(objective: Objective, ratio: Ratio) -> None:
    """Where nothing has moved, a token's gradient is minus its advantage; a response's ratio has a mean's or a sum's of them."""
    old_T = -randn(sum(LENGTHS), seed=3).abs()
    advantages_T = torch.cat([torch.full((n,), float(i) - 2, dtype=DOUBLE) for i, n in enumerate(LENGTHS)])
    logp_T = old_T.clone().requires_grad_()
    surrogate = Surrogate(0.2, ratio_cap=5.0, ratio=ratio, objective=objective)
    loss, _ = policy_loss(logp_T, ActorTargets(old_T, advantages_T, lengths_R=torch.tensor(LENGTHS)), surrogate, 1)
    loss.backward()
    assert logp_T.grad is not None
    torch.testing.assert_close(logp_T.grad, -advantages_T)


def test_a_ratio_by_tokens_of_a_response_has_each_tokens_own_gradient() -> None:
    """GSPO-token: with advantages that differ within a response, each token is moved by its own."""
    old_T, advantages_T = randn(2, 5, seed=4)
    logp_T = (old_T + 0.01).requires_grad_()
    surrogate, lengths_R = Surrogate(0.9, ratio="sequence_token"), torch.tensor([5])
    loss, _ = policy_loss(logp_T, ActorTargets(old_T, advantages_T, lengths_R=lengths_R), surrogate, 1)
    (gradient_T,) = torch.autograd.grad(loss, logp_T)
    torch.testing.assert_close(gradient_T, -advantages_T * math.exp(0.01))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("moved", [0.0, 0.5], ids=["on-policy", "off-policy"])
def test_the_reverse_gradient_is_that_of_the_kl_in_expectation(estimator: str, moved: float) -> None:
    """Enumerated over a policy's actions; k3's own gradient is that of the reversed KL, and k1's nothing."""
    logits_A, reference_A, noise_A = randn(3, 6, seed=5)
    logits_A.requires_grad_()
    logp_A, reference_A = logits_A.log_softmax(0), reference_A.log_softmax(0)
    old_A = (logits_A + moved * noise_A).log_softmax(0).detach()
    kl = (logp_A.exp() * (logp_A - reference_A)).sum()
    (wanted_A,) = torch.autograd.grad(kl, logits_A, retain_graph=True)
    own_A = kl_per_token(logp_A, reference_A, estimator)
    corrected_A = own_A if estimator == "k2" else with_reverse_gradient(own_A, logp_A, old_A)
    found = (old_A.exp() * corrected_A).sum()
    (gradient_A,) = torch.autograd.grad(found, logits_A, retain_graph=True)
    if estimator != "k2":
        torch.testing.assert_close(found, kl)
    if estimator != "k2" or not moved:
        torch.testing.assert_close(gradient_A, wanted_A)
    (reversed_A,) = torch.autograd.grad(-(reference_A.exp() * logp_A).sum(), logits_A, retain_graph=True)
    (own_gradient_A,) = torch.autograd.grad((logp_A.detach().exp() * own_A).sum(), logits_A)
    expected_A = {"k1": torch.zeros(6, dtype=DOUBLE), "k2": wanted_A, "k3": reversed_A}[estimator]
    torch.testing.assert_close(own_gradient_A, expected_A)


@pytest.mark.parametrize("ratio", get_args(Ratio))
def test_the_weight_of_a_stale_response_is_made_as_its_ratio(ratio: Ratio) -> None:
    behaviour_T, noise_T = randn(2, sum(LENGTHS), seed=6)
    proximal_T = behaviour_T + 0.3 * noise_T
    _, weight_T = ratio_base(behaviour_T, proximal_T, "decoupled", ratio, torch.tensor(LENGTHS))
    expected = []
    for row in (0.3 * noise_T).split(LENGTHS):
        value = {"token": row, "sequence_product": row.sum().expand(len(row))}.get(ratio, row.mean().expand(len(row)))
        expected += [min(math.exp(x), 2.0) for x in value.tolist()]
    assert weight_T is not None and weight_T.tolist() == pytest.approx(expected)
