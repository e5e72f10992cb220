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

LENGTHS = [3, 1, 4]
TRUNCATED = [False, False, True]


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


def shaped(scores: list[float], ppo: PPOConfig, seen: list[float] | None = None) -> list[float]:
    """What the responses are trained on; `seen` are the clipped scores of the batches before."""
    bound = ppo.reward_clip or math.inf
    scores = [min(max(score, -bound), bound) for score in scores]
    if ppo.reward_normalization != "none":
        known = scores + ((seen or []) if ppo.reward_normalization == "running" else [])
        mean = sum(known) / len(known)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in known) / len(known) + 1e-8)
        scores = [(score - mean) / deviation for score in scores]
    cut = ppo.truncated_score
    return [score if cut is None or not truncated else cut for score, truncated in zip(scores, TRUNCATED, strict=True)]


def plain(scored: ScoredBatch, ppo: PPOConfig, coefficient: float) -> dict[str, list[float]]:
    actor, reference, values = (x.tolist() for x in (scored.behaviour_logp_T, scored.reference_logp_T, scored.values_T))
    result: dict[str, list[float]] = {"kl": [], "rewards": [], "advantages": [], "returns": []}
    start = 0
    for length, score in zip(LENGTHS, shaped(scored.scores_B.tolist(), ppo), strict=True):
        d = [actor[i] - reference[i] for i in range(start, start + length)]
        kl = [{"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[ppo.kl.estimator] for x in d]
        rewards = [-coefficient * k if ppo.kl.mode == "penalty" else 0.0 for k in kl]
        rewards[-1] += score
        row_values = [*values[start : start + length], 0.0]
        deltas = [rewards[t] + ppo.gamma * row_values[t + 1] - row_values[t] for t in range(length)]
        decay = ppo.gamma * ppo.gae_lambda
        advantages = [sum(decay ** (u - t) * deltas[u] for u in range(t, length)) for t in range(length)]
        result["kl"] += kl
        result["rewards"] += rewards
        result["advantages"] += advantages
        result["returns"] += [a + v for a, v in zip(advantages, row_values, strict=False)]
        start += length
    return result


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
    expected = plain(scored, ppo, 0.3)
    assert experience.kl_T.tolist() == pytest.approx(expected["kl"], abs=1e-5)
    assert experience.rewards_T.tolist() == pytest.approx(expected["rewards"], abs=1e-5)
    assert experience.advantages_T.tolist() == pytest.approx(expected["advantages"], abs=1e-5)
    assert experience.returns_T.tolist() == pytest.approx(expected["returns"], abs=1e-5)
    assert experience.advantages_T.dtype == torch.float32
    assert torch.equal(experience.old_logp_T, scored.behaviour_logp_T)
    assert torch.equal(experience.old_values_T, scored.values_T)
    assert torch.equal(experience.reference_logp_T, scored.reference_logp_T)
    assert experience.lengths_B.tolist() == LENGTHS


def test_whitening_is_over_the_whole_batch_and_leaves_the_returns() -> None:
    raw = of_ppo(config()).experience(batch(), 0.3)
    white = of_ppo(config(), "whiten").experience(batch(), 0.3)
    advantages = raw.advantages_T.tolist()
    mean = sum(advantages) / 8
    deviation = math.sqrt(sum((a - mean) ** 2 for a in advantages) / 8)
    assert white.advantages_T.tolist() == pytest.approx([(a - mean) / deviation for a in advantages], abs=1e-5)
    assert torch.equal(white.returns_T, raw.returns_T)
    assert white.stats == raw.stats


def test_summary() -> None:
    scored, ppo = batch(), config(reward_clip=1.0)
    stats = of_ppo(ppo).experience(scored, 0.3).stats
    expected = plain(scored, ppo, 0.3)

    def variance(x: list[float]) -> float:
        return sum((v - sum(x) / len(x)) ** 2 for v in x) / len(x)

    scores = [0.5, -7.0, 3.0]
    assert stats.score_mean == pytest.approx(sum(scores) / 3)
    assert stats.score_std == pytest.approx(math.sqrt(variance(scores)))
    assert stats.reward_mean == pytest.approx(sum(expected["rewards"]) / 3, abs=1e-5)
    assert stats.kl_mean == pytest.approx(sum(expected["kl"]) / 3, abs=1e-5)
    assert stats.value_mean == pytest.approx(sum(scored.values_T.tolist()) / 8, abs=1e-5)
    assert stats.return_mean == pytest.approx(sum(expected["returns"]) / 8, abs=1e-5)
    assert stats.advantage_mean == pytest.approx(sum(expected["advantages"]) / 8, abs=1e-5)
    assert stats.advantage_std == pytest.approx(math.sqrt(variance(expected["advantages"])), abs=1e-5)
    explained = 1 - variance(expected["advantages"]) / variance(expected["returns"])
    assert stats.explained_variance == pytest.approx(explained, abs=1e-4)


def test_a_running_normalisation_is_over_all_scores_so_far() -> None:
    ppo, seen = config(reward_normalization="running", reward_clip=4.0), NOTHING_SEEN
    known: list[float] = []
    for scale in (1.0, 2.0, 0.1):
        scored = replace(batch(), scores_B=batch().scores_B * scale)
        experience = of_ppo(ppo).experience(scored, 0.0, seen=seen)
        rewards = experience.rewards_T[[2, 3, 7]].tolist()
        assert rewards == pytest.approx(shaped(scored.scores_B.tolist(), ppo, known), abs=1e-5)
        known += [min(max(score, -4.0), 4.0) for score in scored.scores_B.tolist()]
        seen += experience.scores
        assert seen.count == len(known) and seen.mean == pytest.approx(sum(known) / len(known))


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
