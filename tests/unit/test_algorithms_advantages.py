"""Advantages and whole batches, from scores on, against plain loops, closed forms and permutations of rows; and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oppo_megatron.algorithms.advantages import DEVIATION_EPS, NOTHING_SEEN, compared, equal_groups, gae, token_rewards, whiten
from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience, ScoredBatch
from oppo_megatron.algorithms.packed import lengths_like, tokens_after, tokens_of_rows
from oppo_megatron.config.algorithm import AlgorithmConfig, Baseline, Scale
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.errors import NumericsError, RewardError
from tests.replay.formulas import Batch, advantages_of, kl_of, less_baseline, scaled, scores_for_training, whitened
from tests.replay.formulas import gae as plain_gae
from tests.replay.recipe import Recipe

DOUBLE = torch.float64


unit = st.floats(0.0, 1.0)
row_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def random_batch(lengths: list[int], seed: int, dtype: torch.dtype = DOUBLE) -> tuple[torch.Tensor, torch.Tensor]:
    rewards_T, values_T = torch.randn(2, sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=dtype)
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
    together = gae(rewards_T, values_T, lengths, 0.99, 0.95)
    for before_T, after_T in zip(together, gae(rewards_T[index_T], values_T[index_T], permuted, 0.99, 0.95), strict=True):
        assert torch.equal(before_T[index_T], after_T)
    rows = zip(rewards_T.split(lengths), values_T.split(lengths), strict=True)
    assert torch.equal(torch.cat([gae(rewards, values, [len(rewards)], 0.99, 0.95)[0] for rewards, values in rows]), together[0])
    before_T = token_rewards(scores_B, values_T, lengths, 0.1)
    assert torch.equal(before_T[index_T], token_rewards(scores_B[order], values_T[index_T], permuted, 0.1))


@settings(max_examples=40, deadline=None)
@given(row_lengths, st.floats(0, 2), st.integers(0, 2**31))
def test_token_rewards_equal_a_plain_loop(lengths: list[int], coefficient: float, seed: int) -> None:
    kl_T, other_T = random_batch(lengths, seed)
    scores_B = other_T[: len(lengths)].clone()
    expected = []
    for score, kls in zip(scores_B.tolist(), kl_T.split(lengths), strict=True):
        expected += [-coefficient * kl for kl in kls.tolist()]
        expected[-1] += score
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


def test_whitened_moments_with_a_large_offset_and_of_what_does_not_vary() -> None:
    white_T = whiten(torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3 + 1000)
    assert white_T.dtype == torch.float32 and float(white_T.double().mean()) == pytest.approx(0, abs=1e-4)
    assert float(white_T.double().var(correction=0)) == pytest.approx(1, abs=1e-4)
    for x in ([3.0], [0.1] * 7):
        assert whiten(torch.tensor(x)).tolist() == pytest.approx([0.0] * len(x), abs=1e-3)


def test_tokens_after_and_tokens_of_rows() -> None:
    lengths_B = torch.tensor([3, 1, 2])
    assert tokens_after(lengths_B).tolist() == [2, 1, 0, 0, 1, 0]
    assert tokens_of_rows(lengths_B, [2, 0]).tolist() == [4, 5, 0, 1, 2]
    assert tokens_of_rows(lengths_B, []).tolist() == []
    for lengths in ([2, 2], [3, 0], [4, -1], [[3]]):
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


LENGTHS = [3, 1, 4]
TRUNCATED = [False, False, True]
ENDS = [2, 3, 7]


def config(**changes: object) -> PPOConfig:
    return PPOConfig.model_validate({"gamma": 0.9, "gae_lambda": 0.8, **changes})


def of_ppo(ppo: PPOConfig, scale: str = "none") -> Algorithm:
    return Algorithm(AlgorithmConfig.model_validate({"scale": scale}), ppo, group_size=1, longest=4)


def batch(seed: int = 0) -> ScoredBatch:
    actor_T, reference_T, values_T = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    scores_B = torch.tensor([0.5, -7.0, 3.0])
    return ScoredBatch(-actor_T.abs(), -reference_T.abs(), values_T, scores_B, LENGTHS, torch.tensor(TRUNCATED))


def recipe_of(ppo: PPOConfig) -> Recipe:
    names = ("gamma", "gae_lambda", "reward_clip", "reward_normalization", "truncated_score")
    return Recipe(scale="none", kl=ppo.kl.mode, estimator=ppo.kl.estimator, **{name: getattr(ppo, name) for name in names})


def plain(scored: ScoredBatch, ppo: PPOConfig, coefficient: float) -> dict[str, torch.Tensor]:
    recipe, tensors = recipe_of(ppo), (scored.behaviour_logp_T, scored.reference_logp_T, scored.values_T)
    rows = Batch(scored.scores_B, range(3), TRUNCATED, *(list(x_T.split(LENGTHS)) for x_T in tensors))
    scores_B, greedy, _ = scores_for_training(rows, recipe, torch.zeros(0))
    advantages, returns = advantages_of(rows, scores_B, greedy, recipe, coefficient)
    kl_T = kl_of(*tensors[:2], ppo.kl.estimator)
    rewards_T = -coefficient * kl_T if ppo.kl.mode == "penalty" else torch.zeros_like(kl_T)
    rewards_T[ENDS] += scores_B
    return {"kl_T": kl_T, "rewards_T": rewards_T, "advantages_T": torch.cat(advantages), "returns_T": torch.cat(returns)}


OPTIONS: list[dict[str, object]] = [
    {}, {"reward_clip": 1.0}, {"truncated": -2.0}, {"truncated": -2.0, "reward_clip": 1.0},
    {"truncated": -2.0, "reward_normalization": "running"}, {"reward_normalization": "batch", "reward_clip": 1.0},
    {"kl": {"mode": "loss", "estimator": "k2"}}, {"kl": {"estimator": "k2"}}, {"kl": {"estimator": "k3"}},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_experience_equals_a_plain_pass(options: dict[str, object]) -> None:
    scored, ppo = batch(), config(**options)
    experience = of_ppo(ppo).experience(scored, 0.3)
    for name, expected_T in plain(scored, ppo, 0.3).items():
        torch.testing.assert_close(getattr(experience, name), expected_T, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: name + m)
    assert experience.advantages_T.dtype == torch.float32
    assert torch.equal(experience.old_logp_T, scored.behaviour_logp_T)
    assert torch.equal(experience.old_values_T, scored.values_T)
    assert torch.equal(experience.reference_logp_T, scored.reference_logp_T)
    assert experience.lengths_B.tolist() == LENGTHS


def test_whitening_is_over_the_whole_batch_and_leaves_the_returns() -> None:
    raw = of_ppo(config()).experience(batch(), 0.3)
    white = of_ppo(config(), "whiten").experience(batch(), 0.3)
    torch.testing.assert_close(white.advantages_T, whitened([raw.advantages_T])[0])
    assert torch.equal(white.returns_T, raw.returns_T) and white.stats == raw.stats


def test_summary() -> None:
    scored, ppo = batch(), config(reward_clip=1.0)
    stats = of_ppo(ppo).experience(scored, 0.3).stats
    kl_T, rewards_T, advantages_T, returns_T = plain(scored, ppo, 0.3).values()
    scores_B = torch.tensor([0.5, -7.0, 3.0])
    expected = {
        "score_mean": scores_B.mean(), "score_std": scores_B.std(correction=0), "reward_mean": rewards_T.sum() / 3,
        "kl_mean": kl_T.sum() / 3, "value_mean": scored.values_T.mean(), "return_mean": returns_T.mean(),
        "advantage_mean": advantages_T.mean(), "advantage_std": advantages_T.std(correction=0),
        "explained_variance": 1 - advantages_T.var(correction=0) / returns_T.var(correction=0),
    }  # fmt: skip
    found = {name: getattr(stats, name) for name in expected}
    assert found == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-4)


def test_a_running_normalisation_is_over_all_scores_so_far() -> None:
    ppo, seen, known = config(reward_normalization="running", reward_clip=4.0), NOTHING_SEEN, torch.zeros(0)
    for scale in (1.0, 2.0, 0.1):
        scored = replace(batch(), scores_B=batch().scores_B * scale)
        experience = of_ppo(ppo).experience(scored, 0.0, seen=seen)
        expected_B, _, known = scores_for_training(Batch(scored.scores_B, range(3), TRUNCATED, [], []), recipe_of(ppo), known)
        torch.testing.assert_close(experience.rewards_T[ENDS], expected_B)
        seen += experience.scores
        assert seen.count == len(known) and seen.mean == pytest.approx(float(known.mean()))


def test_explained_variance_of_a_perfect_critic_of_flat_returns_and_of_one_token() -> None:
    scores_B, exact = torch.tensor([2.0, -1.0, 5.0]), of_ppo(config(gamma=1.0, gae_lambda=1.0))
    perfect = replace(batch(), values_T=scores_B.repeat_interleave(torch.tensor(LENGTHS)), scores_B=scores_B)
    assert exact.experience(perfect, 0.0).stats.explained_variance == pytest.approx(1.0)
    assert exact.experience(replace(batch(), scores_B=torch.ones(3)), 0.0).stats.explained_variance == 0.0
    one_T = torch.tensor([-0.5])
    scored = ScoredBatch(one_T, one_T, one_T, torch.tensor([2.0]), [1], torch.tensor([False]))
    experience: Experience = of_ppo(config(), "whiten").experience(scored, 0.1)
    assert experience.advantages_T.tolist() == [0.0] and experience.returns_T.tolist() == [2.0]
    assert experience.stats.score_std == 0.0 and experience.stats.explained_variance == 0.0


def test_inputs_are_not_changed_and_no_gradient_is_kept() -> None:
    scored = batch()
    scored.values_T.requires_grad_()
    copies = [x.detach().clone() for x in (scored.values_T, scored.behaviour_logp_T, scored.scores_B)]
    experience = of_ppo(config(truncated=0.0, reward_clip=1.0)).experience(scored, 0.3)
    for before, after in zip(copies, (scored.values_T, scored.behaviour_logp_T, scored.scores_B), strict=True):
        assert torch.equal(before, after)
    assert not experience.returns_T.requires_grad and not experience.old_values_T.requires_grad


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_names_its_row_even_where_it_would_be_replaced(value: float) -> None:
    scores_B = torch.tensor([0.5, 1.0, value])
    with pytest.raises(RewardError, match=rf"score of row 2 is {value}"):
        of_ppo(config(truncated=0.0, reward_clip=1.0)).experience(replace(batch(), scores_B=scores_B), 0.1)


@pytest.mark.parametrize(("field", "name", "value"), [
    ("values_T", "value", math.nan), ("behaviour_logp_T", "behaviour log-prob", math.nan),
    ("reference_logp_T", "reference log-prob", math.nan), ("behaviour_logp_T", "KL to the reference", -200.0),
])  # fmt: skip
@pytest.mark.parametrize(("token", "row", "position"), [(0, 0, 0), (2, 0, 2), (3, 1, 0), (4, 2, 0), (7, 2, 3)])
def test_a_token_that_is_not_finite_is_named(field: str, name: str, value: float, token: int, row: int, position: int) -> None:
    scored, wrong = batch(), "inf" if value < 0 else "nan"
    getattr(scored, field)[token] = value
    with pytest.raises(NumericsError, match=f"the {name} of row {row}, response token {position}, is {wrong}"):
        of_ppo(config(kl={"estimator": "k3"})).experience(scored, 0.1)
