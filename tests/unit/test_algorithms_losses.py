"""Losses against plain loops, finite differences and additivity over micro-batches; staleness corrections."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.algorithms.losses import (
    POLICY_FIGURES,
    ActorTargets,
    Surrogate,
    actor_loss,
    kl_per_token,
    policy_figures,
    policy_loss,
    ratio_base,
    value_loss,
)
from oppo_megatron.algorithms.packed import TokenStats
from oppo_megatron.config.algorithm import Objective
from oppo_megatron.config.ppo import PPOConfig

DOUBLE = torch.float64
SURROGATE = Surrogate(0.2)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def against(old_T: torch.Tensor, advantages_T: torch.Tensor, weight_T: torch.Tensor | None = None) -> ActorTargets:
    return ActorTargets(old_T, advantages_T, weight_T=weight_T)


def plain_policy_loss(
    logp: list[float], old: list[float], advantages: list[float], clip: float, num_tokens: int, weights: list[float]
) -> tuple[float, int]:
    """The loss, and the tokens without a gradient: beyond the range on the side to which their advantage pushes."""
    loss, lost = 0.0, 0
    for new, before, advantage, weight in zip(logp, old, advantages, weights, strict=True):
        ratio = math.exp(new - before)
        held = min(max(ratio, 1 - clip), 1 + clip)
        lost += ratio > 1 + clip if advantage > 0 else ratio < 1 - clip
        loss -= weight * min(ratio * advantage, held * advantage)
    return loss / num_tokens, lost


def plain_value_loss(
    values: list[float], old: list[float], returns: list[float], clip: float, num_tokens: int
) -> tuple[float, int]:
    loss, lost = 0.0, 0
    for value, before, target in zip(values, old, returns, strict=True):
        errors = [(value - target) ** 2]
        if clip > 0:
            held = min(max(value, before - clip), before + clip)
            errors.append((held - target) ** 2)
            lost += held != value and errors[1] > errors[0]
        loss += 0.5 * max(errors)
    return loss / num_tokens, lost


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.floats(0.01, 0.9), st.booleans(), st.integers(0, 2**31))
def test_policy_loss_equals_a_plain_loop(n: int, clip: float, weighted: bool, seed: int) -> None:
    logp_T, noise_T, advantages_T, weight_T = randn(4, n, seed=seed)
    old_T, weight_T = logp_T + 0.5 * noise_T, weight_T.exp()
    weights = weight_T.tolist() if weighted else [1.0] * n
    loss, stats = policy_loss(logp_T, against(old_T, advantages_T, weight_T if weighted else None), Surrogate(clip), 7 * n)
    expected, lost = plain_policy_loss(logp_T.tolist(), old_T.tolist(), advantages_T.tolist(), clip, 7 * n, weights)
    assert float(loss) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert float(stats.clipped) == lost
    ratios = [math.exp(a - b) for a, b in zip(logp_T.tolist(), old_T.tolist(), strict=True)]
    assert float(stats.num_tokens) == n
    assert float(stats.loss) == pytest.approx(expected * 7 * n, rel=1e-9, abs=1e-12)
    assert float(stats.ratio) == pytest.approx(sum(ratios))
    assert float(stats.max_ratio) == pytest.approx(max(ratios))
    assert float(stats.weight) == pytest.approx(sum(weights))
    assert float(stats.approx_kl) == pytest.approx(sum(r - 1 - math.log(r) for r in ratios), abs=1e-9)


def test_policy_gradient_by_finite_differences_in_every_region() -> None:
    # ratio below, within and above the clip range, each with an advantage of either sign
    log_ratio_T = torch.tensor([-0.6, -0.6, -0.1, 0.1, 0.5, 0.5], dtype=DOUBLE)
    advantages_T = torch.tensor([1.5, -1.5, 2.0, -2.0, 0.7, -0.7], dtype=DOUBLE)
    old_T = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.9, -1.1], dtype=DOUBLE)
    weight_T = torch.tensor([1.0, 2.0, 0.3, 1.0, 0.5, 1.7], dtype=DOUBLE)
    logp_T = (old_T + log_ratio_T).requires_grad_()

    def loss_of(x_T: torch.Tensor) -> torch.Tensor:
        return policy_loss(x_T, against(old_T, advantages_T, weight_T), Surrogate(0.2), 11)[0]

    (gradient_T,) = torch.autograd.grad(loss_of(logp_T), logp_T)
    assert [g == 0 for g in gradient_T.tolist()] == [False, True, False, False, True, False]
    assert torch.autograd.gradcheck(loss_of, (logp_T,))


@pytest.mark.parametrize("objective", ["clip", "cispo", "plain"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_lost_gradient_is_what_autograd_finds_missing(objective: Objective, dual_clip: float | None) -> None:
    """By tokens of responses with stale tokens and without: |advantage| by weight and share, where the bounds leave less."""
    n = 60
    logp_T, noise_T, advantages_T, weight_T, share_T = randn(5, n, seed=3)
    old_T, weight_T, share_T = logp_T - noise_T, weight_T.exp(), share_T.exp()
    advantages_T[:4], stale_T = 0.0, torch.arange(n) % 3 == 0
    targets = ActorTargets(old_T, advantages_T, weight_T=weight_T, share_T=share_T, stale_T=stale_T)
    logp_T = logp_T.requires_grad_()
    loss, stats = policy_loss(logp_T, targets, Surrogate(0.2, None, dual_clip, 1.5, objective=objective), 1)
    (gradient_T,) = torch.autograd.grad(loss, logp_T)
    assert not any(value.requires_grad for value in vars(stats).values())
    size_T = advantages_T.abs() * weight_T * share_T
    unbounded_T = size_T * (1.0 if objective == "plain" else noise_T.exp())
    missing_T = torch.where(unbounded_T > 0, 1 - gradient_T.abs() / unbounded_T, 0.0)
    assert float(stats.clipped) == int((missing_T > 1e-9).sum()) and (objective == "plain") == (float(stats.clipped) == 0)
    for name, of_T in (("fresh", ~stale_T), ("stale", stale_T)):
        assert float(getattr(stats, f"{name}_gradient")) == pytest.approx(float(size_T[of_T].sum()))
        assert float(getattr(stats, f"{name}_lost")) == pytest.approx(float((size_T * missing_T)[of_T].sum()), abs=1e-9)
    figures = policy_figures([{name: float(value) for name, value in vars(stats).items()}] * 2)
    assert figures["lost_gradient_stale"] == pytest.approx(float(stats.stale_lost) / float(stats.stale_gradient))
    assert figures["clip_fraction"] == pytest.approx(float(stats.clipped) / n) and tuple(figures) == POLICY_FIGURES


def test_a_ratio_that_is_0_or_infinite_loses_none_or_all_of_its_gradient() -> None:
    old_T, logp_T = torch.zeros(2), torch.tensor([-200.0, 200.0])
    targets = ActorTargets(old_T, torch.ones(2))
    stats = policy_loss(logp_T, targets, Surrogate(0.2, ratio_cap=1.5, objective="cispo"), 1)[1]
    assert float(stats.fresh_lost) == float(stats.clipped) == 1.0


def test_without_stale_responses_none_of_their_gradient_is_lost() -> None:
    old_T, advantages_T = randn(2, 9, seed=1)
    _, stats = policy_loss(old_T + 5, against(old_T, advantages_T.abs()), Surrogate(0.2), 9)
    figures = policy_figures([{name: float(value) for name, value in vars(stats).items()}])
    assert (figures["lost_gradient_fresh"], figures["lost_gradient_stale"]) == (1.0, 0.0)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.sampled_from([0.0, 0.2, 1.0]), st.integers(0, 2**31))
def test_value_loss_equals_a_plain_loop(n: int, clip: float, seed: int) -> None:
    values_T, old_T, returns_T = randn(3, n, seed=seed)
    loss, stats = value_loss(values_T, old_T, returns_T, clip, 3 * n)
    expected, outside = plain_value_loss(values_T.tolist(), old_T.tolist(), returns_T.tolist(), clip, 3 * n)
    assert float(loss) == pytest.approx(expected, rel=1e-9)
    assert float(stats.clipped) == outside
    squares = [(v - r) ** 2 for v, r in zip(values_T.tolist(), returns_T.tolist(), strict=True)]
    assert float(stats.squared_error) == pytest.approx(sum(squares))


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_value_gradient_by_finite_differences_in_every_region(clip: float) -> None:
    old_T = torch.zeros(5, dtype=DOUBLE)
    returns_T = torch.tensor([1.0, 0.1, -1.0, 1.0, -1.0], dtype=DOUBLE)
    # towards the return beyond the clip, past the return, within, away from the return, towards it from below
    values_T = torch.tensor([0.5, 0.5, 0.1, -0.5, -0.5], dtype=DOUBLE, requires_grad=True)

    def loss_of(x_T: torch.Tensor) -> torch.Tensor:
        return value_loss(x_T, old_T, returns_T, clip, 5)[0]

    (gradient_T,) = torch.autograd.grad(loss_of(values_T), values_T)
    assert [g == 0 for g in gradient_T.tolist()] == ([True, False, False, False, True] if clip else [False] * 5)
    assert torch.autograd.gradcheck(loss_of, (values_T,))


def config(**changes: object) -> PPOConfig:
    return PPOConfig.model_validate(changes)


def actor_inputs(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, ActorTargets]:
    logp_T, noise_T, advantages_T, reference_T, entropy_T, weight_T = randn(6, n, seed=seed)
    targets = ActorTargets(logp_T + 0.3 * noise_T, advantages_T, reference_T, weight_T.exp())
    return logp_T, entropy_T.abs(), targets


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("mode", ["penalty", "loss"])
def test_actor_loss_is_the_sum_of_its_terms(mode: str, estimator: str) -> None:
    logp_T, entropy_T, targets = actor_inputs(6, seed=2)
    ppo = config(entropy_coefficient=0.01, clip=0.1, kl={"mode": mode, "estimator": estimator, "coefficient": 9.0})
    loss, stats = actor_loss(logp_T, entropy_T, targets, Surrogate(ppo.clip), ppo, kl_coefficient=0.3, num_tokens=12)
    assert targets.weight_T is not None and targets.reference_logp_T is not None
    expected, _ = plain_policy_loss(
        logp_T.tolist(), targets.old_logp_T.tolist(), targets.advantages_T.tolist(), 0.1, 12, targets.weight_T.tolist()
    )
    d = [a - b for a, b in zip(logp_T.tolist(), targets.reference_logp_T.tolist(), strict=True)]
    kl = sum({"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator] for x in d)
    entropy = sum(entropy_T.tolist())
    expected += (0.3 * kl / 12 if mode == "loss" else 0.0) - 0.01 * entropy / 12
    assert float(loss) == pytest.approx(expected, rel=1e-9)
    assert float(stats.kl) == pytest.approx(kl) and float(stats.entropy) == pytest.approx(entropy)


def test_actor_gradient_by_finite_differences() -> None:
    logp_T, entropy_T, targets = actor_inputs(8, seed=3)
    ppo = config(entropy_coefficient=0.5, kl={"mode": "loss", "estimator": "k3"})

    def loss_of(x_T: torch.Tensor, y_T: torch.Tensor) -> torch.Tensor:
        return actor_loss(x_T, y_T, targets, SURROGATE, ppo, 0.3, 8)[0]

    assert torch.autograd.gradcheck(loss_of, (logp_T.requires_grad_(), entropy_T.requires_grad_()))


def test_entropy_is_rewarded_and_needs_no_gradient_when_its_coefficient_is_zero() -> None:
    entropy_T = torch.tensor([1.0, 3.0], requires_grad=True)
    logp_T, _, targets = actor_inputs(2, seed=4)
    actor_loss(logp_T, entropy_T, targets, SURROGATE, config(entropy_coefficient=0.1), 0.0, 8)[0].backward()
    assert entropy_T.grad is not None and entropy_T.grad.tolist() == pytest.approx([-0.1 / 8] * 2)
    loss, _ = actor_loss(logp_T, entropy_T, targets, SURROGATE, config(), 0.0, 2)
    assert not loss.requires_grad


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), st.integers(0, 2**31))
def test_micro_batches_add_up_to_the_minibatch(sizes: list[int], seed: int) -> None:
    n = sum(sizes)
    logp_T, entropy_T, targets = actor_inputs(n, seed)
    values_T, old_values_T, returns_T = randn(3, n, seed=seed + 1)
    ppo = config(entropy_coefficient=0.01, kl={"mode": "loss", "estimator": "k2"})
    logp_T.requires_grad_()
    whole, whole_stats = actor_loss(logp_T, entropy_T, targets, SURROGATE, ppo, 0.1, n)
    whole_value, whole_value_stats = value_loss(values_T, old_values_T, returns_T, 0.2, n)
    (gradient_T,) = torch.autograd.grad(whole, logp_T)

    parts, value_parts = [], []
    for part in torch.arange(n).split(sizes):
        assert targets.weight_T is not None and targets.reference_logp_T is not None
        micro = ActorTargets(
            targets.old_logp_T[part], targets.advantages_T[part], targets.reference_logp_T[part], targets.weight_T[part]
        )
        parts.append(actor_loss(logp_T[part], entropy_T[part], micro, SURROGATE, ppo, 0.1, n))
        value_parts.append(value_loss(values_T[part], old_values_T[part], returns_T[part], 0.2, n))
    summed = torch.stack([loss for loss, _ in parts]).sum()
    torch.testing.assert_close(summed, whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(summed, logp_T)[0], gradient_T, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.stack([loss for loss, _ in value_parts]).sum(), whole_value)
    assert_same_stats([stats for _, stats in parts], whole_stats)
    assert_same_stats([stats for _, stats in value_parts], whole_value_stats)


def assert_same_stats(parts: list[TokenStats], whole: TokenStats) -> None:
    """Sums add up, and of maxima the largest is the whole's."""
    for f in fields(whole):
        values = [float(getattr(stats, f.name)) for stats in parts]
        together = max(values) if f.name.startswith("max_") else sum(values)
        assert together == pytest.approx(float(getattr(whole, f.name)), rel=1e-9, abs=1e-9), f.name


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_corrections_agree_to_the_bit_when_nothing_is_stale(dtype: torch.dtype) -> None:
    logp_T, behaviour_T, advantages_T = randn(3, 50, seed=6).to(dtype)
    results = []
    for correction in ("behaviour", "decoupled"):
        fresh_T = logp_T.clone().requires_grad_()
        old_T, weight_T = ratio_base(behaviour_T, behaviour_T.clone(), correction)
        loss, _ = policy_loss(fresh_T, against(old_T, advantages_T, weight_T), SURROGATE, 50)
        loss.backward()
        results.append((loss.detach(), fresh_T.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_decoupled_weights_are_truncated_and_detached() -> None:
    proximal_T = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    behaviour_T = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(5), -200.0])
    old_T, weight_T = ratio_base(behaviour_T, proximal_T, "decoupled")
    assert weight_T is not None and weight_T.tolist() == pytest.approx([1.0, 0.5, 2.0, 2.0])
    assert not weight_T.requires_grad and not old_T.requires_grad and torch.equal(old_T, proximal_T.detach())
    old_T, weight_T = ratio_base(behaviour_T, None, "behaviour")
    assert weight_T is None and torch.equal(old_T, behaviour_T)


def test_untruncated_decoupled_equals_behaviour_inside_the_clip_range() -> None:
    """(actor / proximal) (proximal / behaviour) = actor / behaviour: without clip and cap both weigh alike."""
    behaviour_T, noise_T, more_T, advantages_T = randn(4, 20, seed=8)
    proximal_T, logp_T = behaviour_T + 0.1 * noise_T, behaviour_T + 0.1 * more_T
    losses = []
    for correction in ("behaviour", "decoupled"):
        old_T, weight_T = ratio_base(behaviour_T, proximal_T, correction, weight_cap=1e9)
        losses.append(float(policy_loss(logp_T, against(old_T, advantages_T, weight_T), Surrogate(0.99), 20)[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_kl_estimates_are_0_for_equal_policies_and_k2_and_k3_never_negative() -> None:
    reference_T = torch.linspace(-8, 0, 400)
    logp_T = torch.full_like(reference_T, -3.0)
    assert all((kl_per_token(logp_T, reference_T, estimator) >= 0).all() for estimator in ("k2", "k3"))
    assert not any(kl_per_token(logp_T, logp_T, estimator).any() for estimator in ("k1", "k2", "k3"))
