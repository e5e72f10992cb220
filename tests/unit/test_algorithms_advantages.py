"""Token rewards, GAE, baselines, scales, whitening and packing against plain loops, closed forms and permutations of rows."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oppo_megatron.algorithms.advantages import DEVIATION_EPS, compared, equal_groups, gae, token_rewards, whiten
from oppo_megatron.algorithms.packed import lengths_like, tokens_after, tokens_of_rows
from oppo_megatron.config.algorithm import Baseline, Scale
from tests.replay.formulas import gae as plain_gae
from tests.replay.formulas import less_baseline, scaled
from tests.replay.recipe import Recipe

DOUBLE = torch.float64


def split(x_T: torch.Tensor, lengths: list[int]) -> list[list[float]]:
    return [part.tolist() for part in x_T.split(lengths)]


unit = st.floats(0.0, 1.0)
row_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def random_batch(lengths: list[int], seed: int, dtype: torch.dtype = DOUBLE) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards_T, values_T = torch.randn(2, sum(lengths), generator=generator, dtype=dtype)
    return rewards_T, values_T


@settings(max_examples=60, deadline=None)
@given(row_lengths, unit, unit, st.integers(0, 2**31))
@example([1, 2, 3, 63, 64, 65, 1000], 1.0, 1.0, 3)
def test_gae_equals_a_plain_loop_over_each_response(lengths: list[int], gamma: float, gae_lambda: float, seed: int) -> None:
    rewards_T, values_T = random_batch(lengths, seed)
    advantages_T, returns_T = gae(rewards_T, values_T, lengths, gamma, gae_lambda)
    rows = zip(rewards_T.split(lengths), values_T.split(lengths), strict=True)
    expected_T = torch.cat([plain_gae(rewards, values, gamma, gae_lambda) for rewards, values in rows])
    torch.testing.assert_close(advantages_T, expected_T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(returns_T, expected_T + values_T, rtol=1e-9, atol=1e-9)


def test_gae_in_single_precision_stays_close_over_thousands_of_tokens() -> None:
    lengths = [4096, 1, 3000]
    rewards_T, values_T = random_batch(lengths, 5)
    exact_T, _ = gae(rewards_T, values_T, lengths, 1.0, 0.95)
    single_T, returns_T = gae(rewards_T.float(), values_T.float(), torch.tensor(lengths), 1.0, 0.95)
    assert single_T.dtype == returns_T.dtype == torch.float32
    torch.testing.assert_close(single_T.double(), exact_T, rtol=1e-4, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(row_lengths, st.randoms(use_true_random=False), st.integers(0, 2**31))
def test_a_rows_results_do_not_depend_on_its_neighbours_to_the_bit(lengths: list[int], random: object, seed: int) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)
    rewards_T, values_T = random_batch(lengths, seed, torch.float32)
    scores_B = rewards_T[: len(lengths)].clone()
    index_T = tokens_of_rows(torch.tensor(lengths), order)
    permuted = [lengths[b] for b in order]
    for before_T, after_T in zip(
        gae(rewards_T, values_T, lengths, 0.99, 0.95),
        gae(rewards_T[index_T], values_T[index_T], permuted, 0.99, 0.95),
        strict=True,
    ):
        assert torch.equal(before_T[index_T], after_T)
    alone = [
        gae(rewards, values, [len(rewards)], 0.99, 0.95)[0]
        for rewards, values in zip(rewards_T.split(lengths), values_T.split(lengths), strict=True)
    ]
    assert torch.equal(torch.cat(alone), gae(rewards_T, values_T, lengths, 0.99, 0.95)[0])
    before_T = token_rewards(scores_B, values_T, lengths, 0.1)
    assert torch.equal(before_T[index_T], token_rewards(scores_B[order], values_T[index_T], permuted, 0.1))


@settings(max_examples=40, deadline=None)
@given(row_lengths, st.floats(0, 2), st.integers(0, 2**31))
def test_token_rewards_equal_a_plain_loop(lengths: list[int], coefficient: float, seed: int) -> None:
    kl_T, other_T = random_batch(lengths, seed)
    scores_B = other_T[: len(lengths)].clone()
    expected = []
    for score, kls in zip(scores_B.tolist(), split(kl_T, lengths), strict=True):
        row = [-coefficient * kl for kl in kls]
        row[-1] += score
        expected += row
    kl_before_T = kl_T.clone()
    assert token_rewards(scores_B, kl_T, lengths, coefficient).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert torch.equal(kl_T, kl_before_T), "the KL it was given must not change"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=50))
def test_whitening_equals_the_textbook_formula(values: list[float]) -> None:
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    if variance > 1e-6:
        expected = [(v - mean) / math.sqrt(variance + 1e-8) for v in values]
        assert whiten(torch.tensor(values, dtype=DOUBLE)).tolist() == pytest.approx(expected, abs=1e-4)


def test_whitened_moments_and_dtype_with_a_large_offset() -> None:
    x_T = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3 + 1000
    white_T = whiten(x_T)
    assert white_T.dtype == torch.float32
    assert float(white_T.double().mean()) == pytest.approx(0, abs=1e-4)
    assert float(white_T.double().var(correction=0)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("x", [[3.0], [0.1] * 7])
def test_whitening_what_does_not_vary_gives_zeros(x: list[float]) -> None:
    assert whiten(torch.tensor(x)).tolist() == pytest.approx([0.0] * len(x), abs=1e-3)


def test_tokens_after_and_tokens_of_rows() -> None:
    lengths_B = torch.tensor([3, 1, 2])
    assert tokens_after(lengths_B).tolist() == [2, 1, 0, 0, 1, 0]
    assert tokens_of_rows(lengths_B, [2, 0]).tolist() == [4, 5, 0, 1, 2]
    assert tokens_of_rows(lengths_B, []).tolist() == []


@pytest.mark.parametrize("lengths", [[2, 2], [3, 0], [4, -1], [[3]]])
def test_lengths_that_do_not_cover_the_tokens_are_refused(lengths: list[int]) -> None:
    with pytest.raises(AssertionError, match="packed tokens|at least one token|1-D"):
        lengths_like(torch.zeros(3), lengths)


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
