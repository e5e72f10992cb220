"""A batch from scores to advantages: against a plain pass over lists, option by option, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from oppo_megatron.algorithms.advantages import NOTHING_SEEN
from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience, ScoredBatch
from oppo_megatron.config.algorithm import AlgorithmConfig
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.errors import NumericsError, RewardError
from tests.replay.formulas import Batch, advantages_of, kl_of, scores_for_training, whitened
from tests.replay.recipe import Recipe

LENGTHS = [3, 1, 4]
TRUNCATED = [False, False, True]
ENDS = [2, 3, 7]


def config(**changes: object) -> PPOConfig:
    return PPOConfig.model_validate({"gamma": 0.9, "gae_lambda": 0.8, **changes})


def of_ppo(ppo: PPOConfig, scale: str = "none") -> Algorithm:
    return Algorithm(AlgorithmConfig.model_validate({"scale": scale}), ppo, group_size=1, longest=4)


def batch(seed: int = 0) -> ScoredBatch:
    actor_T, reference_T, values_T = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    return ScoredBatch(
        behaviour_logp_T=-actor_T.abs(),
        reference_logp_T=-reference_T.abs(),
        values_T=values_T,
        scores_B=torch.tensor([0.5, -7.0, 3.0]),
        lengths_B=LENGTHS,
        truncated_B=torch.tensor(TRUNCATED),
    )


def recipe_of(ppo: PPOConfig) -> Recipe:
    names = ("gamma", "gae_lambda", "reward_clip", "reward_normalization", "truncated_score")
    numbers = {name: getattr(ppo, name) for name in names}
    return Recipe(scale="none", kl=ppo.kl.mode, estimator=ppo.kl.estimator, **numbers)


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
    {},
    {"reward_clip": 1.0},
    {"truncated": -2.0},
    {"truncated": -2.0, "reward_clip": 1.0},
    {"truncated": -2.0, "reward_normalization": "running"},
    {"reward_normalization": "batch", "reward_clip": 1.0},
    {"kl": {"mode": "loss", "estimator": "k2"}},
    {"kl": {"estimator": "k2"}},
    {"kl": {"estimator": "k3"}},
]


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
    assert torch.equal(white.returns_T, raw.returns_T)
    assert white.stats == raw.stats


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


def test_explained_variance_of_a_perfect_critic_is_one_and_of_flat_returns_zero() -> None:
    values_T = torch.tensor([2.0, 2.0, 2.0, -1.0, 5.0, 5.0, 5.0, 5.0])
    scores_B = torch.tensor([2.0, -1.0, 5.0])
    exact = config(gamma=1.0, gae_lambda=1.0)
    perfect = replace(batch(), values_T=values_T, scores_B=scores_B)
    assert of_ppo(exact).experience(perfect, 0.0).stats.explained_variance == pytest.approx(1.0)
    flat = replace(batch(), scores_B=torch.ones(3))
    assert of_ppo(exact).experience(flat, 0.0).stats.explained_variance == 0.0


def test_one_response_of_one_token() -> None:
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


@pytest.mark.parametrize(
    ("field", "name"),
    [("values_T", "value"), ("behaviour_logp_T", "behaviour log-prob"), ("reference_logp_T", "reference log-prob")],
)
@pytest.mark.parametrize(("token", "row", "position"), [(0, 0, 0), (2, 0, 2), (3, 1, 0), (4, 2, 0), (7, 2, 3)])
def test_a_token_that_is_not_finite_names_quantity_row_and_position(
    field: str, name: str, token: int, row: int, position: int
) -> None:
    scored = batch()
    getattr(scored, field)[token] = math.nan
    with pytest.raises(NumericsError, match=f"the {name} of row {row}, response token {position}, is nan"):
        of_ppo(config()).experience(scored, 0.1)


def test_a_kl_that_overflows_is_named() -> None:
    scored = batch()
    scored.behaviour_logp_T[4] = -200.0
    with pytest.raises(NumericsError, match="KL to the reference of row 2, response token 0, is inf"):
        of_ppo(config(kl={"estimator": "k3"})).experience(scored, 0.1)
