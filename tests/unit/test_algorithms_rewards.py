"""Greedy baselines, responses that were cut and process rewards against plain loops, closed forms and enumeration."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from oppo_megatron.algorithms.advantages import token_rewards
from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience, GreedyRows, ScoredBatch, build_experience
from oppo_megatron.algorithms.losses import ActorTargets, row_weights, shared
from oppo_megatron.algorithms.packed import to_tokens
from oppo_megatron.algorithms.supervised_losses import means, response_scores, step_loss, step_scores
from oppo_megatron.config.algorithm import PRESETS, AlgorithmConfig, Reduction
from oppo_megatron.config.ppo import KLConfig, PPOConfig
from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.errors import RewardError
from oppo_megatron.token_text import StepEnds
from oppo_megatron.train.score_exchange import StepRewards
from tests.support.tokenizers import CharacterTokenizer

DOUBLE = torch.float64
BETA = 0.3
SYMBOLS, END, LONGEST = 3, 0, 3
"""The tabular policy's tokens, its end token, and its longest response."""


def remax(group_size: int = 1, ppo: PPOConfig | None = None, **choices: Any) -> Algorithm:
    usual = PPOConfig(kl=KLConfig(**PRESETS["remax"].kl))
    return Algorithm(AlgorithmConfig(preset="remax", **choices), ppo or usual, group_size, LONGEST)


def batch(seed: int, group_size: int) -> ScoredBatch:
    draw = torch.Generator().manual_seed(seed)
    groups = int(torch.randint(1, 5, (), generator=draw))
    rows = groups * group_size
    lengths_B = torch.randint(1, 9, (rows,), generator=draw)
    actor_T, reference_T = -torch.randn(2, int(lengths_B.sum()), generator=draw, dtype=DOUBLE).abs()
    greedy_G, lengths_G = torch.randn(groups, generator=draw, dtype=DOUBLE), torch.randint(1, 9, (groups,), generator=draw)
    greedy = GreedyRows(greedy_G, lengths_G, torch.rand(groups, generator=draw) < 0.3)
    scores_B, cut_B = torch.randn(rows, generator=draw, dtype=DOUBLE), torch.rand(rows, generator=draw) < 0.3
    return ScoredBatch(actor_T, reference_T, None, scores_B, lengths_B.tolist(), cut_B, group_size=group_size, greedy=greedy)


@pytest.mark.parametrize("group_size", [1, 3])
def test_advantages_are_what_follows_less_the_greedy_score(group_size: int) -> None:
    """A_t = sum over u >= t of r_u, less b: the KL is in what follows, and never in the baseline (arXiv 2310.10505)."""
    for seed in range(50):
        scored = batch(seed, group_size)
        made = remax(group_size).experience(scored, BETA)
        rest_T = scored.scores_B - scored.greedy.scores_G.repeat_interleave(group_size)
        kls = (scored.behaviour_logp_T - scored.reference_logp_T).split(scored.lengths_B)
        expected = [rest - BETA * kl.flip(0).cumsum(0).flip(0) for rest, kl in zip(rest_T, kls, strict=True)]
        torch.testing.assert_close(made.advantages_T, torch.cat(expected), rtol=0, atol=1e-6)
        assert made.stats.greedy_score_mean == pytest.approx(float(scored.greedy.scores_G.mean()))
        assert made.stats.score_mean == pytest.approx(float(scored.scores_B.mean())), "of what is trained"


def test_a_greedy_score_is_made_as_the_others_are_refused_if_no_number_and_teaches_nothing_if_equal() -> None:
    scored = ScoredBatch(
        torch.zeros(4, dtype=DOUBLE), None, None, torch.tensor([1.0, 3.0], dtype=DOUBLE), [2, 2], torch.tensor([False, False]),
        greedy=GreedyRows(torch.tensor([9.0, 2.0], dtype=DOUBLE), torch.tensor([2, 3]), torch.tensor([False, True])),
    )  # fmt: skip
    ppo = PPOConfig(reward_clip=4.0, reward_normalization="batch", truncated=-0.5, kl=KLConfig(mode="none"))
    found = remax(1, ppo).experience(scored, 0.0).advantages_T
    # Mean 2 and deviation 1; the greedy ones come to 4 - 2, and to what a cut response gets.
    first, second = -1 - 2, 1 + 0.5
    assert found.tolist() == pytest.approx([first, first, second, second], abs=1e-6)
    scored = batch(0, 1)
    scored.greedy.scores_G[-1] = torch.nan
    with pytest.raises(RewardError, match=f"the score of greedy row {len(scored.greedy.scores_G) - 1} is nan"):
        remax().experience(scored, BETA)
    scores_B, whole_B = torch.tensor([0.7, 0.7]), torch.tensor([False, False])
    greedy = GreedyRows(torch.tensor([0.7, 0.1]), torch.tensor([1, 1]), whole_B)
    even = ScoredBatch(torch.zeros(2), None, None, scores_B, [1, 1], whole_B, greedy=greedy)
    made = remax(1, PPOConfig(kl=KLConfig(mode="none"))).experience(even, 0.0)
    assert made.advantages_T[0] == 0.0 and made.advantages_T[1] != 0.0 and made.stats.equal_groups == 0.5


def responses() -> list[tuple[int, ...]]:
    found = [
        tokens
        for length in range(1, LONGEST + 1)
        for tokens in itertools.product(range(SYMBOLS), repeat=length)
        if END not in tokens[:-1] and (tokens[-1] == END or length == LONGEST)
    ]
    assert len(found) == 1 + 2 + 4 * 3
    return found


def logp_of(table: dict[tuple[int, ...], Tensor], tokens: tuple[int, ...]) -> Tensor:
    return torch.stack([table[tokens[:t]].log_softmax(-1)[token] for t, token in enumerate(tokens)])


def test_the_expected_gradient_is_that_without_a_baseline() -> None:
    """A greedy response's baseline leaves the mean gradient over all responses alone; a response's own score does not."""
    prefixes = [tokens for length in range(LONGEST) for tokens in itertools.product(range(1, SYMBOLS), repeat=length)]
    draw = torch.Generator().manual_seed(3)
    table = {each: torch.randn(SYMBOLS, generator=draw, dtype=DOUBLE, requires_grad=True) for each in prefixes}
    reference = {each: torch.randn(SYMBOLS, generator=draw, dtype=DOUBLE) for each in prefixes}
    scores = {tokens: float(torch.randn((), generator=draw, dtype=DOUBLE)) for tokens in responses()}
    greedy: tuple[int, ...] = ()
    while len(greedy) < LONGEST and greedy[-1:] != (END,):
        greedy = (*greedy, int(table[greedy].argmax()))

    def expected_gradient(algorithm: Algorithm, baseline: float | None) -> Tensor:
        total, mass = torch.zeros((), dtype=DOUBLE), 0.0
        for tokens in responses():
            logp_T = logp_of(table, tokens)
            old_T = logp_T.detach()
            own = torch.tensor([scores[tokens]], dtype=DOUBLE)
            compared_with = own if baseline is None else torch.full((1,), baseline, dtype=DOUBLE)
            scored = ScoredBatch(
                old_T, logp_of(reference, tokens), None, own, [len(tokens)], torch.tensor([False]),
                greedy=GreedyRows(compared_with, torch.tensor([1]), torch.tensor([False])),
            )  # fmt: skip
            made: Experience = algorithm.experience(scored, BETA)
            share_T = torch.full_like(old_T, algorithm.row_weights([len(tokens)])[0])
            targets = ActorTargets(old_T, made.advantages_T, share_T=share_T)
            loss, _ = algorithm.actor_loss(logp_T, torch.zeros_like(old_T), targets, BETA, len(tokens))
            probability = float(old_T.sum().exp())
            total, mass = total + probability * loss, mass + probability
        assert mass == pytest.approx(1.0)
        return torch.cat([x.flatten() for x in torch.autograd.grad(total, list(table.values()))])

    plain = expected_gradient(remax(baseline="none"), 0.0)
    assert plain.abs().max() > 1e-2
    for objective in ("clip", "plain"):
        assert (expected_gradient(remax(objective=objective), scores[greedy]) - plain).abs().max() < 1e-12, objective
    assert (expected_gradient(remax(), None) - plain).abs().max() > 1e-2


MOST = 10


def cut_batch(lengths: Sequence[int], scores: Sequence[float], size: int) -> ScoredBatch:
    cut_B = torch.tensor([length == MOST for length in lengths])
    return ScoredBatch(-torch.ones(sum(lengths)), None, None, torch.tensor(scores), list(lengths), cut_B, group_size=size)


def cut_experience(batch: ScoredBatch, *, mask: bool = False) -> Experience:
    ppo = PPOConfig(truncated="mask" if mask else None)
    return Algorithm(AlgorithmConfig(preset="dr_grpo"), ppo, batch.group_size, MOST).experience(batch, 0.0)


def test_responses_that_leave_the_loss_stay_in_the_mean_of_their_group_and_count_as_equal() -> None:
    batch = cut_batch([2, 10, 3, 3], [1.0, 0.0, 1.0, 0.0], size=2)
    found, plain = cut_experience(batch, mask=True), cut_experience(batch)
    assert found.counted_B.tolist() == [True, False, True, True]
    assert torch.equal(found.advantages_T, plain.advantages_T) and found.advantages_T[0] == 0.5
    assert cut_experience(cut_batch([2, 10, 3, 3], [1.0, 1.0, 1.0, 0.0], size=2)).stats.equal_groups == 0.5
    assert cut_experience(cut_batch([2, 3], [1.0, 1.0], size=1)).stats.equal_groups is None


def trl_loss(losses: list[Tensor], counted: Sequence[bool], reduction: Reduction, size: int) -> float:
    """`GRPOTrainer._compute_loss` (TRL 1.12.0) over padded rows of one batch; a group's mean as in arXiv 2503.14476 eq. 8."""
    per_token_loss, mask = torch.zeros(2, len(losses), max(map(len, losses)), dtype=torch.float64)
    for i, row in enumerate(losses):
        per_token_loss[i, : len(row)], mask[i, : len(row)] = row, float(counted[i])
    sums = (per_token_loss * mask).sum(-1)
    if reduction == "token_mean":  # dapo: num_items_in_batch is the mask's sum
        return float(sums.sum() / mask.sum().clamp(min=1.0))
    if reduction == "sequence_mean":  # grpo
        return float((sums / mask.sum(-1).clamp(min=1.0)).mean())
    if reduction == "constant":  # dr_grpo
        return float(sums.sum() / (len(losses) * MOST))
    if reduction == "sequence_sum":  # luspo; RLOO of sums
        return float(sums.mean())
    groups = [slice(at, at + size) for at in range(0, len(losses), size)]
    return float(sum(sums[g].sum() / mask[g].sum().clamp(min=1.0) for g in groups) / len(groups))


@pytest.mark.parametrize("counted", ["all", "some", "one of a group", "no group", "none"])
@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_what_is_left_of_the_loss_is_what_trl_leaves(reduction: Reduction, counted: str) -> None:
    lengths = [3, 1, 4, 2, 6, 1]
    of = {
        "all": [True] * 6, "some": [True, False, True, True, False, True], "one of a group": [True, False] * 3,
        "no group": [True, True, False, False, True, True], "none": [False] * 6,
    }[counted]  # fmt: skip
    losses = list(torch.randn(sum(lengths), generator=torch.Generator().manual_seed(3), dtype=torch.float64).split(lengths))
    weights = row_weights(lengths, 2, reduction, MOST, of)
    share_T = to_tokens(torch.tensor(weights, dtype=torch.float64), torch.tensor(lengths), sum(lengths))
    loss = float(shared(torch.cat(losses), share_T).sum() / sum(lengths))
    assert loss == pytest.approx(trl_loss(losses, of, reduction, 2), rel=1e-12, abs=1e-15)
    if counted == "all":
        assert weights == row_weights(lengths, 2, reduction, MOST)
        assert reduction != "token_mean" or weights == [1.0] * 6, "plain PPO multiplies by nothing"


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
def test_it_is_the_cross_entropy_of_two_logits_and_adds_up(labelled: list[tuple[float, float]], data: st.DataObject) -> None:
    """The two-class model's, whose logits differ by ours."""
    logits_R, labels_R = tensors(labelled)
    whole, _ = step_loss(logits_R, labels_R, len(labelled))
    wrong_R = torch.linspace(-3, 3, len(labelled), dtype=torch.float64)
    two_R2 = torch.stack([wrong_R, wrong_R + logits_R], -1)
    assert float(whole) == pytest.approx(float(cross_entropy(two_R2, torch.stack([1 - labels_R, labels_R], -1))), abs=1e-12)
    cut = data.draw(st.integers(0, len(labelled)))
    shares = [step_loss(logits_R[part], labels_R[part], len(labelled))[0] for part in (slice(cut), slice(cut, None))]
    assert float(sum(shares)) == pytest.approx(float(whole), abs=1e-12)


def test_what_step_scores_come_to() -> None:
    scores_S, counts = step_scores(torch.tensor([0.0, math.log(3.0), -math.log(4.0), math.log(9.0)])), [3, 1]
    assert scores_S.tolist() == pytest.approx([0.5, 0.75, 0.2, 0.9]) and scores_S.dtype == torch.float64
    expected = {
        "last": ([0.2, 0.9], None), "min": ([0.2, 0.9], None), "sum": ([1.45, 0.9], [0.5, 0.75, 0.2, 0.9]),
        "potential": ([0.2, 0.9], [0.5, 0.25, -0.55, 0.9]),
    }  # fmt: skip
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
    assert rewards_T.tolist() == pytest.approx(expected, abs=1e-6)
    assert scores_B.tolist() == pytest.approx([p_T[2] + p_T[5], p_T[9], p_T[11] + p_T[13]], abs=1e-6)
    ends = steps.ends(responses)
    at_ends = [logits_T[start + end] for start, row in zip((0, 7, 10), ends, strict=True) for end in row]
    assert torch.equal(steps.scores(torch.stack(at_ends), ends), scores_B)
    totals_B, kl_T = torch.tensor([3.0, -1.0, 0.5]), torch.linspace(-1, 1, len(logits_T))
    earned_T = token_rewards(totals_B, kl_T, [7, 3, 4], 0.1, rewards_T) + 0.1 * kl_T
    assert [float(row.sum()) for row in earned_T.split([7, 3, 4])] == pytest.approx(totals_B.tolist(), abs=1e-6)
    assert [place for place, rest in enumerate((earned_T - rewards_T).tolist()) if abs(rest) > 1e-6] == [6, 9, 13]


@pytest.mark.parametrize("algorithm", [
    *({"preset": name} for name in ("grpo", "dr_grpo", "rloo", "magistral")), {"preset": "reinforce_pp", "scale": "none"},
], ids=str)  # fmt: skip
def test_a_response_earns_its_compared_score_with_steps_as_without(algorithm: dict[str, str]) -> None:
    lengths, generator = [3, 5, 2, 4], torch.Generator().manual_seed(3)
    choices, ppo = AlgorithmConfig(**algorithm), PPOConfig(gamma=1.0)
    logp_T, reference_T = -torch.rand(2, sum(lengths), generator=generator)
    steps_T = torch.zeros(sum(lengths)).index_fill_(0, torch.tensor([1, 4, 6, 11]), 0.5)
    scores_B, whole_B = torch.tensor([1.0, -2.0, 0.5, 0.0]), torch.zeros(4, dtype=torch.bool)
    scored = ScoredBatch(logp_T, reference_T, None, scores_B, lengths, whole_B, group_size=2)
    whole = build_experience(scored, choices, ppo, 0.1)
    by_steps = build_experience(replace(scored, step_rewards_T=steps_T), choices, ppo, 0.1)
    given = [steps.cumsum(0) - steps for steps in steps_T.split(lengths)]
    for name in ("advantages_T", "returns_T"):
        expected_T = getattr(whole, name) - torch.cat(given)
        assert torch.allclose(getattr(by_steps, name), expected_T, atol=1e-6)
