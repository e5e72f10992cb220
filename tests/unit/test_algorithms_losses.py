"""Losses and gradients against plain loops and enumeration; micro-batches; stale rows; the gap between decoding and training."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oppo_megatron.algorithms import losses
from oppo_megatron.algorithms.losses import ActorTargets, Surrogate, actor_loss, policy_loss
from oppo_megatron.algorithms.packed import GapLimit, gap_stats, judged_gap, rounding_scale
from oppo_megatron.config.algorithm import Objective, Ratio
from oppo_megatron.config.ppo import STALENESS_BOUNDS, PPOConfig
from oppo_megatron.config.reliability import GuardsConfig
from tests.replay.formulas import actor_loss as plain_actor_loss
from tests.replay.formulas import critic_loss, kl_of, row_losses, row_ratio
from tests.replay.recipe import Gradient, Recipe

DOUBLE = torch.float64
SURROGATE = Surrogate(0.2)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


LENGTHS = [3, 1, 4, 2, 6, 1]


SURROGATES = {
    "clip": Surrogate(0.2), "clip-higher": Surrogate(0.2, clip_high=0.5), "dual clip": Surrogate(0.2, dual_clip=1.3),
    "cispo": Surrogate(0.2, ratio_cap=1.1, objective="cispo"), "plain": Surrogate(0.2, objective="plain"),
}  # fmt: skip


@pytest.mark.parametrize("ratio", get_args(Ratio))
@pytest.mark.parametrize("name", SURROGATES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_surrogate_equals_plain_loops_over_rows(name: str, ratio: Ratio, seed: int) -> None:
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
    torch.testing.assert_close(*(torch.autograd.grad(x, logp_T)[0] for x in (loss, expected / 40)))
    ratio_T = torch.cat([row_ratio(new, old, recipe) for new, old, _ in rows])
    kl = float(kl_of(old_T, logp_T, "k3").sum())
    found = [float(getattr(stats, name)) for name in ("num_tokens", "loss", "ratio", "max_ratio", "weight", "approx_kl")]
    due = [sum(LENGTHS), float(expected), float(ratio_T.sum()), float(ratio_T.max()), float(weight_T.sum()), kl]
    assert found == pytest.approx(due, rel=1e-9)


@pytest.mark.parametrize("objective", ["clip", "cispo", "plain"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_lost_gradient_is_what_autograd_finds_missing(objective: Objective, dual_clip: float | None) -> None:
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
    figures = losses.policy_figures([{name: float(value) for name, value in vars(stats).items()}] * 2)
    assert figures["lost_gradient_stale"] == pytest.approx(float(stats.stale_lost) / float(stats.stale_gradient))
    assert figures["clip_fraction"] == pytest.approx(float(stats.clipped) / n) and tuple(figures) == losses.POLICY_FIGURES


def test_a_ratio_that_is_0_or_infinite_loses_none_or_all_of_its_gradient_and_no_stale_response_none() -> None:
    targets, cispo = ActorTargets(torch.zeros(2), torch.ones(2)), Surrogate(0.2, ratio_cap=1.5, objective="cispo")
    stats = policy_loss(torch.tensor([-200.0, 200.0]), targets, cispo, 1)[1]
    assert float(stats.fresh_lost) == float(stats.clipped) == 1.0
    old_T, advantages_T = randn(2, 9, seed=1)
    _, stats = policy_loss(old_T + 5, ActorTargets(old_T, advantages_T.abs()), SURROGATE, 9)
    figures = losses.policy_figures([{name: float(value) for name, value in vars(stats).items()}])
    assert (figures["lost_gradient_fresh"], figures["lost_gradient_stale"]) == (1.0, 0.0)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.sampled_from([0.0, 0.2, 1.0]), st.integers(0, 2**31))
def test_value_loss_equals_a_plain_loop(n: int, clip: float, seed: int) -> None:
    values_T, old_T, returns_T = randn(3, n, seed=seed)
    values_T.requires_grad_()
    loss, stats = losses.value_loss(values_T, old_T, returns_T, clip, n)
    expected = critic_loss([values_T], [old_T], [returns_T], Recipe(value_clip=clip))
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(x, values_T)[0] for x in (loss, expected)]
    torch.testing.assert_close(*gradients)
    assert float(stats.clipped) == int((gradients[1] == 0).sum()), "what the clip range takes away"
    assert float(stats.squared_error) == pytest.approx(float((values_T - returns_T).square().sum()))


def actor_inputs(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, ActorTargets]:
    logp_T, noise_T, advantages_T, reference_T, entropy_T, weight_T = randn(6, n, seed=seed)
    return logp_T, entropy_T.abs(), ActorTargets(logp_T + 0.3 * noise_T, advantages_T, reference_T, weight_T.exp())


@pytest.mark.parametrize(
    ("mode", "estimator"), [("penalty", "k1"), ("penalty", "k3"), *(("loss", x) for x in ("k1+", "k2", "k3", "k3+"))]
)
def test_actor_loss_is_the_sum_of_its_terms(mode: str, estimator: str) -> None:
    logp_T, entropy_T, targets = actor_inputs(6, seed=2)
    ppo = PPOConfig(entropy_coefficient=0.01, clip=0.1, kl={"mode": mode, "estimator": estimator, "coefficient": 9.0})
    inputs = logp_T.requires_grad_(), entropy_T.requires_grad_()
    loss, stats = actor_loss(logp_T, entropy_T, targets, Surrogate(ppo.clip), ppo, kl_coefficient=0.3, num_tokens=6)
    gradient: Gradient = "ratio" if estimator.endswith("+") else "estimator"
    clips = {"clip_low": 0.1, "clip_high": 0.1}
    recipe = Recipe(kl=mode, estimator=estimator.rstrip("+"), kl_gradient=gradient, entropy_coefficient=0.01, **clips)
    rows = ([x_T] for x_T in (targets.old_logp_T, targets.weight_T, targets.advantages_T, targets.reference_logp_T))
    expected = plain_actor_loss([logp_T], [entropy_T], *rows, [0], recipe, 0.3)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs))
    assert float(stats.kl) == pytest.approx(float(kl_of(logp_T, targets.reference_logp_T, estimator.rstrip("+")).sum()))
    assert float(stats.entropy) == pytest.approx(float(entropy_T.sum()))


def test_entropy_is_rewarded_and_needs_no_gradient_when_its_coefficient_is_zero() -> None:
    entropy_T = torch.tensor([1.0, 3.0], requires_grad=True)
    logp_T, _, targets = actor_inputs(2, seed=4)
    actor_loss(logp_T, entropy_T, targets, SURROGATE, PPOConfig(entropy_coefficient=0.1), 0.0, 8)[0].backward()
    assert entropy_T.grad.tolist() == pytest.approx([-0.1 / 8] * 2)
    assert not actor_loss(logp_T, entropy_T, targets, SURROGATE, PPOConfig(), 0.0, 2)[0].requires_grad


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), st.integers(0, 2**31))
def test_micro_batches_add_up_to_the_minibatch(sizes: list[int], seed: int) -> None:
    n = sum(sizes)
    logp_T, entropy_T, targets = actor_inputs(n, seed)
    values_T, old_values_T, returns_T = randn(3, n, seed=seed + 1)
    ppo = PPOConfig(entropy_coefficient=0.01, kl={"mode": "loss", "estimator": "k2"})
    logp_T.requires_grad_()
    whole, whole_stats = actor_loss(logp_T, entropy_T, targets, SURROGATE, ppo, 0.1, n)
    whole_value, whole_value_stats = losses.value_loss(values_T, old_values_T, returns_T, 0.2, n)
    (gradient_T,) = torch.autograd.grad(whole, logp_T)
    parts, value_parts = [], []
    for part in torch.arange(n).split(sizes):
        known = (targets.old_logp_T, targets.advantages_T, targets.reference_logp_T, targets.weight_T)
        micro = ActorTargets(*(x_T[part] for x_T in known))
        parts.append(actor_loss(logp_T[part], entropy_T[part], micro, SURROGATE, ppo, 0.1, n))
        value_parts.append(losses.value_loss(values_T[part], old_values_T[part], returns_T[part], 0.2, n))
    summed = torch.stack([loss for loss, _ in parts]).sum()
    torch.testing.assert_close(summed, whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(summed, logp_T)[0], gradient_T, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.stack([loss for loss, _ in value_parts]).sum(), whole_value)
    for found, expected in ((parts, whole_stats), (value_parts, whole_value_stats)):
        for name, value in vars(expected).items():
            values = [float(getattr(stats, name)) for _, stats in found]
            together = max(values) if name.startswith("max_") else sum(values)
            assert together == pytest.approx(float(value), rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_corrections_agree_to_the_bit_when_nothing_is_stale(dtype: torch.dtype) -> None:
    logp_T, behaviour_T, advantages_T = randn(3, 50, seed=6).to(dtype)
    results = []
    for correction in STALENESS_BOUNDS:
        fresh_T = logp_T.clone().requires_grad_()
        old_T, weight_T = base(correction, behaviour_T, behaviour_T.clone(), advantages_T, [50])
        loss, _ = policy_loss(fresh_T, ActorTargets(old_T, advantages_T, weight_T=weight_T), SURROGATE, 50)
        loss.backward()
        results.append((loss.detach(), fresh_T.grad))
    assert all(torch.equal(first, other) for first, *others in zip(*results, strict=True) for other in others)


def base(
    correction: str, behaviour_T: Tensor, proximal_T: Tensor | None, advantages_T: Tensor, lengths: list[int],
    ratio: Ratio = "token", bounds: list[float] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    ppo = PPOConfig(staleness=correction, staleness_bounds=bounds)  # type: ignore[arg-type]
    return losses.ratio_base(behaviour_T, proximal_T, advantages_T, torch.tensor(lengths), ppo, ratio)


def expected_weights(
    correction: str,
    behaviour: list[float],
    proximal: list[float],
    advantages: list[float],
    ratio: Ratio,
    bounds: tuple[float, ...],
) -> list[float]:
    """Return the weights of one response, in plain float64."""
    logs = [new - old for new, old in zip(proximal, behaviour, strict=True)]
    mean, total = sum(logs) / len(logs), sum(logs)
    weights = {"token": [math.exp(x) for x in logs], "sequence_product": [math.exp(total)] * len(logs)}.get(
        ratio, [math.exp(mean)] * len(logs)
    )
    if correction == "decoupled":
        return [min(max(w, bounds[0]), bounds[1]) for w in weights]
    if correction == "icepop":
        return [w if bounds[0] <= w <= bounds[1] else 0.0 for w in weights]
    if correction == "seq_mask":
        return [w if bounds[0] <= math.exp(mean) <= bounds[1] else 0.0 for w in weights]
    return [0.0 if advantage < 0 and -mean > bounds[0] else 1.0 for advantage in advantages]


@pytest.mark.parametrize("ratio", get_args(Ratio))
@pytest.mark.parametrize(("correction", "bounds"), [
    ("decoupled", None), ("decoupled", [0.5, 1.5]), ("icepop", None), ("icepop", [0.8, 1.2]), ("seq_mask", None),
    ("seq_mask", [0.9, 1.1]), ("opsm", None), ("opsm", [0.1]),
])  # fmt: skip
def test_weights_of_stale_tokens_are_as_written(correction: str, bounds: list[float] | None, ratio: Ratio) -> None:
    seen = set()
    for seed in range(20):
        behaviour_T, noise_T, advantages_T = randn(3, sum(LENGTHS), seed=seed)
        proximal_T = behaviour_T + [0.002, 0.1, 0.7][seed % 3] * noise_T
        old_T, weight_T = base(correction, behaviour_T, proximal_T, advantages_T, LENGTHS, ratio, bounds)
        assert weight_T is not None and torch.equal(old_T, behaviour_T if correction == "opsm" else proximal_T)
        columns = (each.split(LENGTHS) for each in (behaviour_T, proximal_T, advantages_T))
        limits = STALENESS_BOUNDS[correction] if bounds is None else tuple(bounds)
        expected = [expected_weights(correction, *(c.tolist() for c in row), ratio, limits) for row in zip(*columns, strict=True)]
        torch.testing.assert_close(weight_T, torch.tensor(sum(expected, []), dtype=weight_T.dtype))
        seen |= {float(w) == 0.0 for w in weight_T}
    assert seen == ({False} if correction == "decoupled" else {True, False})


def test_bounds_are_inclusive_and_weights_detached() -> None:
    proximal_T = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    behaviour_T, ones_T = torch.tensor([-1.0, -1.0 + math.log(2), -1.0 - math.log(5), -200.0]), torch.ones(4)
    old_T, weight_T = base("decoupled", behaviour_T, proximal_T, ones_T, [4])
    assert weight_T is not None and weight_T.tolist() == pytest.approx([1.0, 0.5, 2.0, 2.0])
    assert not weight_T.requires_grad and not old_T.requires_grad and torch.equal(old_T, proximal_T.detach())
    kept = base("icepop", torch.zeros(3), torch.tensor([0.0, 0.1, -0.1]), torch.ones(3), [3], bounds=[1.0, 1.5])[1]
    assert kept is not None and kept.tolist() == pytest.approx([1.0, math.exp(0.1), 0.0])
    old_T, weight_T = base("decoupled", behaviour_T, None, ones_T, [4])
    assert weight_T is None and torch.equal(old_T, behaviour_T)


def test_kl_estimates_are_0_for_equal_policies_and_k2_and_k3_never_negative() -> None:
    reference_T = torch.linspace(-8, 0, 400)
    logp_T = torch.full_like(reference_T, -3.0)
    assert all((losses.kl_per_token(logp_T, reference_T, estimator) >= 0).all() for estimator in ("k2", "k3"))
    assert not any(losses.kl_per_token(logp_T, logp_T, estimator).any() for estimator in ("k1", "k2", "k3"))


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
    own_A = losses.kl_per_token(logp_A, reference_A, estimator)
    corrected_A = own_A if estimator == "k2" else own_A * (logp_A - old_A).exp()
    found = (old_A.exp() * corrected_A).sum()
    (gradient_A,) = torch.autograd.grad(found, logits_A, retain_graph=True)
    if estimator != "k2":
        torch.testing.assert_close(found, kl)
    if estimator != "k2" or not moved:
        torch.testing.assert_close(gradient_A, wanted_A)
    (reversed_A,) = torch.autograd.grad(-(reference_A.exp() * logp_A).sum(), logits_A, retain_graph=True)
    (own_gradient_A,) = torch.autograd.grad((logp_A.detach().exp() * own_A).sum(), logits_A)
    torch.testing.assert_close(own_gradient_A, {"k1": torch.zeros(6, dtype=DOUBLE), "k2": wanted_A, "k3": reversed_A}[estimator])


AUTO = GapLimit.of(GuardsConfig(), "bfloat16", 1.0)


def exact_logits(num_tokens: int, offset: float, seed: int = 0) -> torch.Tensor:
    """[R, V], peaked as a trained policy's."""
    return 4.0 * randn(num_tokens, 512, seed=seed) + offset


def judged(logits_RV: torch.Tensor, changed_RV: torch.Tensor, limit: GapLimit = AUTO) -> tuple[float, float]:
    """(what is held against the limit, the largest difference) of decoded and trained logits as a model in bfloat16 gives them:
    hidden states rounded another way in each path, then each logit."""
    decoded_RV, trained_RV = (
        (x_RV + 0.01 * randn(*x_RV.shape, seed=seed)).to(torch.bfloat16).double()
        for x_RV, seed in ((logits_RV, 1), (changed_RV, 2))
    )
    tokens_R1 = torch.multinomial(logits_RV.softmax(-1), 1, generator=torch.Generator().manual_seed(5))
    difference_R = (trained_RV.log_softmax(-1) - decoded_RV.log_softmax(-1)).gather(-1, tokens_R1)[:, 0]
    stats = gap_stats(difference_R, trained_RV.abs().amax(-1), torch.ones(len(tokens_R1)), limit)
    figures = {name: float(value) for name, value in stats.items()}
    return judged_gap(limit, **figures), figures["max_logprob_gap"]


@pytest.mark.parametrize("offset", [0.0, 40.0, -40.0, 100.0])
def test_an_offset_that_all_logits_share_is_no_defect(offset: float) -> None:
    logits_RV = exact_logits(4000, offset)
    found, largest = judged(logits_RV, logits_RV)
    assert found < AUTO.nats
    assert (largest > AUTO.nats) == (offset != 0), "what the largest difference alone would say"


@pytest.mark.parametrize("offset", [0.0, 40.0])
@pytest.mark.parametrize("defect", ["wrong position", "wrong temperature", "stale weight"])
def test_a_defect_shows_on_a_few_tokens(defect: str, offset: float) -> None:
    logits_RV = exact_logits(16, offset)
    trained_RV = {
        "wrong position": logits_RV.roll(1, 0), "wrong temperature": logits_RV / 0.7,
        "stale weight": logits_RV + 0.2 * (exact_logits(16, 0.0, seed=3)),
    }[defect]  # fmt: skip
    assert judged(logits_RV, trained_RV)[0] > AUTO.nats


def test_a_defect_of_two_tokens_among_thousands_shows_and_a_given_limit_is_for_every_token() -> None:
    logits_RV = exact_logits(4000, 0.0)
    trained_RV = logits_RV.clone()
    trained_RV[100:102] = logits_RV[200:202]
    assert judged(logits_RV, trained_RV)[0] > AUTO.nats
    logits_RV = exact_logits(4000, 40.0)
    found, largest = judged(logits_RV, logits_RV, GapLimit(0.25))
    assert found == largest > 0.25


def test_the_scale_is_that_of_one_rounding_and_older_weights_are_left_out() -> None:
    sizes = torch.tensor([0.1, 16.0, 31.75, 32.0, 63.5, 64.0, 200.0])
    spacing = [float(torch.nextafter(x.bfloat16(), torch.tensor(1e9).bfloat16()) - x.bfloat16()) for x in sizes]
    assert rounding_scale(sizes).tolist() == [max(1.0, each / 0.125) for each in spacing] == [1, 1, 1, 2, 2, 4, 8]
    stats = gap_stats(torch.tensor([9.0, 0.1]), torch.ones(2), torch.tensor([0.0, 1.0]), AUTO)
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(
        {"max_logprob_gap": 0.1, "max_usual_gap": 0.1, "num_fresh": 1.0, "num_beyond": 0.0}
    )
