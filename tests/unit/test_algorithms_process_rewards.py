"""Process rewards: the loss of step labels against closed forms, and what step scores come to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from oppo_megatron.algorithms.advantages import token_rewards
from oppo_megatron.algorithms.experience import ScoredBatch, build_experience
from oppo_megatron.algorithms.supervised_losses import means, response_scores, step_loss, step_scores
from oppo_megatron.config.algorithm import AlgorithmConfig
from oppo_megatron.config.ppo import PPOConfig
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.token_text import StepEnds
from oppo_megatron.train.score_exchange import StepRewards
from tests.support.tokenizers import CharacterTokenizer

LABELLED = st.lists(st.tuples(st.floats(-30, 30), st.floats(0, 1) | st.sampled_from([0.0, 1.0])), min_size=1, max_size=12)


def tensors(labelled: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    logits_R, labels_R = torch.tensor(labelled, dtype=torch.float64).unbind(-1)
    return logits_R.clone().requires_grad_(True), labels_R


@given(LABELLED)
def test_loss_and_gradient_against_plain_arithmetic(labelled: list[tuple[float, float]]) -> None:
    logits_R, labels_R = tensors(labelled)
    loss, stats = step_loss(logits_R, labels_R, len(labelled))
    nll = [math.log1p(math.exp(-abs(x))) + max(x, 0.0) - x * y for x, y in labelled]
    assert float(loss) == pytest.approx(sum(nll) / len(nll), abs=1e-12)
    right = [0.5 if abs(x) <= 4 * 2.0**-52 else (x > 0) == (y > 0.5) for x, y in labelled]
    assert means(stats) == pytest.approx({"loss": float(loss), "accuracy": sum(right) / len(right)}, abs=1e-12)
    loss.backward()
    gradient = [(1 / (1 + math.exp(-x)) - y) / len(labelled) for x, y in labelled]
    assert logits_R.grad.tolist() == pytest.approx(gradient, abs=1e-12)


@given(LABELLED, st.data())
def test_it_is_the_cross_entropy_of_two_logits_and_shares_add_up(
    labelled: list[tuple[float, float]], data: st.DataObject
) -> None:
    """The two-class model's, whose logits differ by ours."""
    logits_R, labels_R = tensors(labelled)
    whole, _ = step_loss(logits_R, labels_R, len(labelled))
    wrong_R = torch.linspace(-3, 3, len(labelled), dtype=torch.float64)
    two_R2 = torch.stack([wrong_R, wrong_R + logits_R], -1)
    assert float(whole) == pytest.approx(float(cross_entropy(two_R2, torch.stack([1 - labels_R, labels_R], -1))), abs=1e-12)
    cut = data.draw(st.integers(0, len(labelled)))
    shares = [
        step_loss(logits, labels, len(labelled))[0]
        for logits, labels in ((logits_R[:cut], labels_R[:cut]), (logits_R[cut:], labels_R[cut:]))
    ]
    assert float(sum(shares)) == pytest.approx(float(whole), abs=1e-12)


def test_what_step_scores_come_to() -> None:
    scores_S, counts = step_scores(torch.tensor([0.0, math.log(3.0), -math.log(4.0), math.log(9.0)])), [3, 1]
    assert scores_S.tolist() == pytest.approx([0.5, 0.75, 0.2, 0.9]) and scores_S.dtype == torch.float64
    expected = {
        "last": ([0.2, 0.9], None),
        "min": ([0.2, 0.9], None),
        "sum": ([1.45, 0.9], [0.5, 0.75, 0.2, 0.9]),
        "potential": ([0.2, 0.9], [0.5, 0.25, -0.55, 0.9]),
    }
    for how, (of_responses, of_steps) in expected.items():
        scores_B, rewards_S = response_scores(scores_S, counts, how)
        assert scores_B.tolist() == pytest.approx(of_responses)
        assert (None if rewards_S is None else rewards_S.tolist()) == (of_steps and pytest.approx(of_steps))
    assert response_scores(scores_S, [2, 2], "min")[0].tolist() == pytest.approx([0.5, 0.2])


def test_rewards_lie_at_the_ends_of_steps_and_add_up_to_the_score() -> None:
    tokenizer = CharacterTokenizer()
    responses = [tokenizer.encode(text) for text in ("ab\ncd\n\3", "abc", "a\nb\3")]
    logits_T = torch.randn(sum(map(len, responses)), generator=torch.Generator().manual_seed(1))
    part = RewardPart(kind="process", step_rewards="sum", weight=2.0)
    steps = StepRewards(part, StepEnds(part.separator, tokenizer.decode))
    scores_B, rewards_T = steps.of_tokens(logits_T, responses)
    p_T = logits_T.sigmoid().tolist()
    expected = [0, 0, 2 * p_T[2], 0, 0, 2 * p_T[5], 0] + [0, 0, 2 * p_T[9]] + [0, 2 * p_T[11], 0, 2 * p_T[13]]
    assert rewards_T is not None and rewards_T.tolist() == pytest.approx(expected, abs=1e-6)
    assert scores_B.tolist() == pytest.approx([p_T[2] + p_T[5], p_T[9], p_T[11] + p_T[13]], abs=1e-6)
    ends = steps.ends(responses)
    at_ends = [logits_T[start + end] for start, row in zip((0, 7, 10), ends, strict=True) for end in row]
    assert torch.equal(steps.scores(torch.stack(at_ends), ends), scores_B)

    totals_B, kl_T = torch.tensor([3.0, -1.0, 0.5]), torch.linspace(-1, 1, len(logits_T))
    found_T = token_rewards(totals_B, kl_T, [7, 3, 4], 0.1, rewards_T)
    earned_T = found_T + 0.1 * kl_T
    assert [float(row.sum()) for row in earned_T.split([7, 3, 4])] == pytest.approx(totals_B.tolist(), abs=1e-6)
    rest_T = earned_T - rewards_T
    assert [place for place, rest in enumerate(rest_T.tolist()) if abs(rest) > 1e-6] == [6, 9, 13]


@pytest.mark.parametrize(
    "algorithm",
    [*({"preset": name} for name in ("grpo", "dr_grpo", "rloo", "magistral")), {"preset": "reinforce_pp", "scale": "none"}],
    ids=str,
)
def test_a_response_earns_its_compared_score_with_steps_as_without(algorithm: dict[str, str]) -> None:
    lengths, generator = [3, 5, 2, 4], torch.Generator().manual_seed(3)
    choices, ppo = AlgorithmConfig.model_validate(algorithm), PPOConfig.model_validate({"gamma": 1.0})
    logp_T, reference_T = -torch.rand(2, sum(lengths), generator=generator)
    steps_T = torch.zeros(sum(lengths)).index_fill_(0, torch.tensor([1, 4, 6, 11]), 0.5)
    scored = ScoredBatch(
        behaviour_logp_T=logp_T, reference_logp_T=reference_T, values_T=None, scores_B=torch.tensor([1.0, -2.0, 0.5, 0.0]),
        lengths_B=lengths, truncated_B=torch.zeros(4, dtype=torch.bool), group_size=2,
    )  # fmt: skip
    whole = build_experience(scored, choices, ppo, 0.1)
    by_steps = build_experience(replace(scored, step_rewards_T=steps_T), choices, ppo, 0.1)
    given = [steps.cumsum(0) - steps for steps in steps_T.split(lengths)]
    for name in ("advantages_T", "returns_T"):
        expected_T = getattr(whole, name) - torch.cat(given)
        assert torch.allclose(getattr(by_steps, name), expected_T, atol=1e-6)
