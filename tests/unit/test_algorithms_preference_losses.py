"""Losses of DPO's family and of KTO: closed forms and their gradients, shares that add up, what is measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from oppo_megatron.algorithms.decode_gap import token_noise
from oppo_megatron.algorithms.preference_losses import (
    margin_losses,
    mean_loss,
    pair_columns,
    row_columns,
    sequence_sums,
    table_of,
)
from oppo_megatron.algorithms.supervised_losses import means
from oppo_megatron.config.evaluation import PREFERENCE_METRICS
from oppo_megatron.config.supervised import DPOLossConfig

MARGINS = st.floats(-40, 40)
BETAS = st.sampled_from([0.01, 0.1, 1.0])


def double(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def nll(x: float) -> float:
    """-log sigmoid(x)"""
    return math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)) - x


def value_and_slope(margin: float, **rule: Any) -> tuple[float, float]:
    margin_P = double(margin, grad=True)
    losses_P = margin_losses(margin_P, DPOLossConfig(**rule))
    losses_P.sum().backward()
    assert margin_P.grad is not None
    return float(losses_P), float(margin_P.grad)


@given(MARGINS, BETAS, st.sampled_from([0.1, 0.4]))
def test_robust_is_without_bias_over_flipped_pairs(margin: float, beta: float, share: float) -> None:
    """Its mean over pairs of which `share` are the wrong way round is the loss of pairs that are right; slopes alike."""
    right, wrong = (value_and_slope(m, beta=beta, loss="robust", label_smoothing=share) for m in (margin, -margin))
    value, slope = value_and_slope(margin, beta=beta)
    assert (1 - share) * right[0] + share * wrong[0] == pytest.approx(value, abs=1e-9)
    assert (1 - share) * right[1] - share * wrong[1] == pytest.approx(slope, abs=1e-9)


def test_sums_of_sequences() -> None:
    logp_R = torch.tensor([-1.0, -2.0, -4.0, -8.0, -16.0])
    sums_S = sequence_sums(logp_R, [2, 1, 2])
    assert sums_S.tolist() == [-3.0, -4.0, -24.0] and sums_S.dtype == torch.float64


LOGPS, REFERENCE, COUNTS = double(-5.0, -9.0, -3.0, -2.0), double(-6.0, -8.0, -4.0, -5.0), double(2.0, 4.0, 1.0, 5.0)


def test_pairs_and_their_figures() -> None:
    """Ratios 1, -1 and 1, 3: margins 2 and -2."""
    columns = pair_columns(LOGPS, REFERENCE, COUNTS, DPOLossConfig(beta=0.5))
    assert columns["loss"].tolist() == pytest.approx([nll(1.0), nll(-1.0)])
    assert columns["margin"].tolist() == [1.0, -1.0] and columns["accuracy"].tolist() == [1.0, 0.0]
    assert columns["reward_chosen"].tolist() == [0.5, 0.5] and columns["reward_rejected"].tolist() == [-0.5, 1.5]
    tie = pair_columns(double(-1.0, -2.0), double(-1.0, -2.0), double(1.0, 1.0), DPOLossConfig())
    assert float(tie["loss"]) == pytest.approx(math.log(2)) and float(tie["accuracy"]) == 0.5


@pytest.mark.parametrize(("dtype", "noise"), [("float32", 3e-6), ("bfloat16", 0.04)])
@pytest.mark.parametrize("average", [False, True])
def test_a_difference_that_rounding_could_make_has_no_side(dtype: str, noise: float, average: bool) -> None:
    """Policy equal to reference but for rounding: half, whatever the signs; ten times as much has a side."""
    signs_S = double(1, -1, -1, 1, 1, 1, -1, -1)
    rule, counts_S, reference_S = DPOLossConfig(average=average), COUNTS.repeat(2), REFERENCE.repeat(2)
    for factor, expected in ((1.0, [0.5, 0.5, 0.5, 0.5]), (10.0, [1.0, 0.0])):
        logp_S = reference_S + factor * noise * counts_S.sqrt() * signs_S
        pairs = pair_columns(logp_S, reference_S, counts_S, rule, token_noise(dtype))
        assert pairs["accuracy"].tolist()[: len(expected)] == expected
        rows = row_columns(logp_S, reference_S, counts_S, signs_S, DPOLossConfig(loss="kto"), 0.0, token_noise(dtype))
        assert rows["accuracy"].tolist() == [expected[0]] * 8


@given(st.floats(-30, 30), st.floats(0, 20), st.booleans(), BETAS)
def test_kto_against_its_equation(ratio: float, point: float, wanted: bool, beta: float) -> None:
    logp_S, rule = double(ratio - 7.0, grad=True), DPOLossConfig(loss="kto", beta=beta, wanted=1.25, unwanted=0.75)
    columns = row_columns(logp_S, double(-7.0), double(4.0), double(1.0 if wanted else -1.0), rule, point)
    x = beta * (ratio - point if wanted else point - ratio)
    weight = 1.25 if wanted else 0.75
    assert float(columns["loss"]) == pytest.approx(weight * (1 - sigmoid(x)), abs=1e-12)
    (slope,) = torch.autograd.grad(columns["loss"].sum(), logp_S)
    sign = 1.0 if wanted else -1.0
    assert float(slope) == pytest.approx(-weight * sign * beta * sigmoid(x) * sigmoid(-x), abs=1e-12)
    assert float(columns["margin"]) == pytest.approx(x, abs=1e-12)
    assert float(columns["accuracy"]) == (0.5 if abs(x) <= beta * 2.5e-5 * 2 else x > 0)
    assert float(columns["reward"]) == pytest.approx(beta * ratio, abs=1e-12)
    assert float(columns["reference_point"]) == point


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_shares_of_micro_batches_add_up_with_their_statistics(cut: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logp_S, reference_S = (torch.randn(6, dtype=torch.float64, generator=generator) * 3 for _ in range(2))
    counts_S, rule = double(1, 2, 3, 4, 5, 6), DPOLossConfig(label_smoothing=0.1, nll=0.5, average=True)

    def share(first: int, last: int) -> tuple[Tensor, dict[str, Tensor]]:
        of = slice(2 * first, 2 * last)
        return mean_loss(pair_columns(logp_S[of], reference_S[of], counts_S[of], rule), 3)

    (whole, stats), parts = share(0, 3), [share(0, cut), share(cut, 3)]
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), rel=1e-6)
    assert set(stats) == {"count", "loss", "accuracy", "margin", "reward_chosen", "reward_rejected"}
    for name, value in stats.items():
        assert not value.requires_grad
        assert float(sum(part[name] for _, part in parts)) == pytest.approx(float(value), abs=1e-12)
    assert means({name: float(value) for name, value in stats.items()})["loss"] == pytest.approx(float(whole), rel=1e-6)
    table = table_of(pair_columns(logp_S, reference_S, counts_S, rule), PREFERENCE_METRICS)
    assert table.shape == (3, 4) and table[:, 0].tolist() == [1.0] * 3
    assert float(table[:, 1].mean()) == pytest.approx(float(whole), rel=1e-6)


def test_losses_stay_on_the_models_device_and_wait_for_no_value() -> None:
    with FakeTensorMode(), torch.no_grad():
        cuda = torch.device("cuda")
        logp_S = sequence_sums(torch.empty(14, device=cuda), [2, 4, 3, 5])
        others = [torch.empty(4, dtype=torch.float64, device=cuda) for _ in range(2)]
        for columns in (
            pair_columns(logp_S, others[0], others[1], DPOLossConfig(average=True, nll=0.1)),
            row_columns(logp_S, *others, others[0], DPOLossConfig(loss="kto"), 0.5),
        ):
            loss, stats = mean_loss(columns, 4)
            table = table_of(columns, PREFERENCE_METRICS)
            assert {each.device.type for each in (loss, table, *stats.values())} == {"cuda"}
            assert loss.dtype == torch.float32 and table.dtype == torch.float64
