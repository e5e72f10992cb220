"""KL estimators: exact expectations by enumerating a small categorical distribution."""

from __future__ import annotations

import math

import pytest
import torch

from oppo_megatron.algorithms.kl import kl_per_token

LOGITS_V = torch.tensor([0.3, -1.2, 0.8, 0.1, -0.4], dtype=torch.float64)
REFERENCE_V = torch.tensor([-0.5, 0.2, 0.9, -0.7, 0.4], dtype=torch.float64).log_softmax(0)


def plain(estimator: str, actor: float, reference: float) -> float:
    d = actor - reference
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(reference - actor) - 1 - (reference - actor)}[estimator]


def exact_kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_each_token_equals_the_plain_formula(estimator: str) -> None:
    logp_T = LOGITS_V.log_softmax(0)
    expected = [plain(estimator, a, r) for a, r in zip(logp_T.tolist(), REFERENCE_V.tolist(), strict=True)]
    assert kl_per_token(logp_T, REFERENCE_V, estimator).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str) -> None:
    logp_V = LOGITS_V.log_softmax(0)
    expectation = float((logp_V.exp() * kl_per_token(logp_V, REFERENCE_V, estimator)).sum())
    assert expectation == pytest.approx(exact_kl(logp_V.exp().tolist(), REFERENCE_V.exp().tolist()), rel=1e-12)


def test_k2_is_biased_but_approaches_the_kl_as_the_policies_meet() -> None:
    errors = []
    for distance in (1.0, 0.1, 0.01):
        logp_V = (REFERENCE_V + distance * LOGITS_V).log_softmax(0)
        expectation = float((logp_V.exp() * kl_per_token(logp_V, REFERENCE_V, "k2")).sum())
        exact = exact_kl(logp_V.exp().tolist(), REFERENCE_V.exp().tolist())
        errors.append(abs(expectation / exact - 1))
    assert errors[0] > 0.01 and errors[1] < errors[0] / 2 and errors[2] < 0.01


def test_k2_and_k3_are_never_negative_and_zero_where_equal() -> None:
    reference_T = torch.linspace(-8, 0, 400)
    logp_T = torch.full_like(reference_T, -3.0)
    assert (kl_per_token(logp_T, reference_T, "k2") >= 0).all()
    assert (kl_per_token(logp_T, reference_T, "k3") >= 0).all()
    for estimator in ("k1", "k2", "k3"):
        assert not kl_per_token(logp_T, logp_T, estimator).any()


def gradient_of_expectation(estimator: str) -> torch.Tensor:
    """Expected gradient of the estimate as a loss: samples are enumerated, their probability is no variable."""
    logits_V = LOGITS_V.clone().requires_grad_()
    logp_V = logits_V.log_softmax(0)
    (logp_V.exp().detach() * kl_per_token(logp_V, REFERENCE_V, estimator)).sum().backward()
    assert logits_V.grad is not None
    return logits_V.grad


def gradient_of_kl(reverse: bool) -> torch.Tensor:
    logits_V = LOGITS_V.clone().requires_grad_()
    logp_V = logits_V.log_softmax(0)
    first_V, second_V = (REFERENCE_V, logp_V) if reverse else (logp_V, REFERENCE_V)
    (first_V.exp() * (first_V - second_V)).sum().backward()
    assert logits_V.grad is not None
    return logits_V.grad


def test_expected_gradients_are_as_documented() -> None:
    torch.testing.assert_close(gradient_of_expectation("k1"), torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(gradient_of_expectation("k2"), gradient_of_kl(reverse=False))
    torch.testing.assert_close(gradient_of_expectation("k3"), gradient_of_kl(reverse=True))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_by_finite_differences(estimator: str) -> None:
    logp_T = LOGITS_V.log_softmax(0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_per_token(x, REFERENCE_V, estimator), (logp_T,))


def test_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="'k4'.*k1, k2 or k3"):
        kl_per_token(REFERENCE_V, REFERENCE_V, "k4")
