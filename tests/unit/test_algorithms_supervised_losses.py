"""Losses of SFT and of the reward model: closed forms, shares that add up, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.algorithms.supervised_losses import means, next_token_loss, preference_loss, preference_table

EPS = 2.0**-52
SCORES = st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30)), min_size=1, max_size=12)


def test_next_token_shares_of_unequal_micro_batches_add_up_to_the_mean() -> None:
    logp_R = -torch.rand(11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shares = [next_token_loss(part, 11) for part in logp_R.split([1, 7, 3])]
    assert float(sum(loss for loss, _ in shares)) == pytest.approx(float(-logp_R.mean()))
    assert float(sum(stats["loss"] for _, stats in shares)) == pytest.approx(float(-logp_R.sum()))
    assert means({}) == {}, "an early stage has none"


@pytest.mark.parametrize(("far", "share"), [(2e-7, 0.5), (-2e-7, 0.5), (1e-5, 1.0), (-1e-5, 0.0)])
def test_scores_that_rounding_parts_are_a_tie(far: float, share: float) -> None:
    scores_P2 = torch.tensor([[3.0 + 3 * far, 3.0], [-0.1 + 0.1 * far, -0.1]])
    assert preference_table(scores_P2)[:, 2].tolist() == [share, share]
    assert preference_table(torch.tensor([[1.01, 1.0], [1.1, 1.0]]).bfloat16())[:, 2].tolist() == [0.5, 1.0]


@given(SCORES)
def test_preference_loss_against_plain_arithmetic(scores: list[tuple[float, float]]) -> None:
    loss, stats = preference_loss(torch.tensor(scores, dtype=torch.float64), len(scores))
    nll = [math.log1p(math.exp(rejected - chosen)) for chosen, rejected in scores]
    assert float(loss) == pytest.approx(sum(nll) / len(nll), abs=1e-12)
    assert means(stats) == pytest.approx(
        {
            "loss": float(loss),
            "accuracy": sum(0.5 if abs(c - r) <= 4 * EPS * max(abs(c), abs(r)) else c > r for c, r in scores) / len(scores),
            "margin": sum(c - r for c, r in scores) / len(scores),
        },
        abs=1e-12,
    )


@given(SCORES, st.data())
def test_preference_shares_add_up(scores: list[tuple[float, float]], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(scores)))
    scores_P2 = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    whole, whole_stats = preference_loss(scores_P2, len(scores))
    parts = [preference_loss(part, len(scores)) for part in scores_P2.split([cut, len(scores) - cut])]
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), abs=1e-12)
    for name, value in whole_stats.items():
        assert not value.requires_grad
        assert float(sum(stats[name] for _, stats in parts)) == pytest.approx(float(value), abs=1e-12)


def test_gradients_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(2)
    logp_R = torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True)
    scores_P2 = torch.randn(3, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: next_token_loss(x, 9)[0], logp_R)
    assert torch.autograd.gradcheck(lambda x: preference_loss(x, 5)[0], scores_P2)
