"""The greedy baseline: ReMax's advantages by a plain loop, and no bias, by enumeration of a tabular policy's responses."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience, GreedyRows, ScoredBatch
from oppo_megatron.algorithms.losses import ActorTargets
from oppo_megatron.config.algorithm import PRESETS, AlgorithmConfig
from oppo_megatron.config.ppo import KLConfig, PPOConfig
from oppo_megatron.errors import RewardError

DOUBLE = torch.float64
BETA = 0.3
SYMBOLS, END, LONGEST = 3, 0, 3
"""Of the tabular policy: tokens, the one that ends a response, and the most that a response has."""


def remax(group_size: int = 1, ppo: PPOConfig | None = None, **choices: Any) -> Algorithm:
    made = AlgorithmConfig.model_validate({"preset": "remax", **choices})
    usual = PPOConfig(kl=KLConfig(**PRESETS["remax"].kl))
    return Algorithm(made, ppo or usual, group_size, LONGEST)


def batch(seed: int, group_size: int) -> ScoredBatch:
    draw = torch.Generator().manual_seed(seed)
    groups = int(torch.randint(1, 5, (), generator=draw))
    rows = groups * group_size
    lengths_B = torch.randint(1, 9, (rows,), generator=draw)
    actor_T, reference_T = -torch.randn(2, int(lengths_B.sum()), generator=draw, dtype=DOUBLE).abs()
    greedy = GreedyRows(
        torch.randn(groups, generator=draw, dtype=DOUBLE),
        torch.randint(1, 9, (groups,), generator=draw),
        torch.rand(groups, generator=draw) < 0.3,
    )
    scores_B, cut_B = torch.randn(rows, generator=draw, dtype=DOUBLE), torch.rand(rows, generator=draw) < 0.3
    return ScoredBatch(actor_T, reference_T, None, scores_B, lengths_B.tolist(), cut_B, group_size=group_size, greedy=greedy)


@pytest.mark.parametrize("group_size", [1, 3])
def test_advantages_are_what_follows_less_the_greedy_score(group_size: int) -> None:
    """A_t = sum over u >= t of r_u, less b: the KL is in what follows, and never in the baseline (arXiv 2310.10505)."""
    for seed in range(50):
        scored = batch(seed, group_size)
        assert scored.greedy is not None and scored.reference_logp_T is not None
        made = remax(group_size).experience(scored, BETA)
        rest_T = scored.scores_B - scored.greedy.scores_G.repeat_interleave(group_size)
        kls = (scored.behaviour_logp_T - scored.reference_logp_T).split(scored.lengths_B)
        expected = [rest - BETA * kl.flip(0).cumsum(0).flip(0) for rest, kl in zip(rest_T, kls, strict=True)]
        torch.testing.assert_close(made.advantages_T, torch.cat(expected), rtol=0, atol=1e-6)
        assert made.stats.greedy_score_mean == pytest.approx(float(scored.greedy.scores_G.mean()))
        assert made.stats.score_mean == pytest.approx(float(scored.scores_B.mean())), "of what is trained"


def test_a_greedy_score_is_made_as_the_others_are() -> None:
    scored = ScoredBatch(
        torch.zeros(4, dtype=DOUBLE), None, None, torch.tensor([1.0, 3.0], dtype=DOUBLE), [2, 2], torch.tensor([False, False]),
        greedy=GreedyRows(torch.tensor([9.0, 2.0], dtype=DOUBLE), torch.tensor([2, 3]), torch.tensor([False, True])),
    )  # fmt: skip
    ppo = PPOConfig(reward_clip=4.0, reward_normalization="batch", truncated=-0.5, kl=KLConfig(mode="none"))
    found = remax(1, ppo).experience(scored, 0.0).advantages_T
    # Mean 2 and deviation 1; the greedy ones come to 4 - 2, and to what a cut response gets.
    first, second = -1 - 2, 1 + 0.5
    assert found.tolist() == pytest.approx([first, first, second, second], abs=1e-6)


def test_a_greedy_score_that_is_no_number_is_refused() -> None:
    scored = batch(0, 1)
    assert scored.greedy is not None
    scores_G = scored.greedy.scores_G.clone()
    scores_G[-1] = torch.nan
    with pytest.raises(RewardError, match=f"the score of greedy row {len(scores_G) - 1} is nan"):
        remax().experience(replace(scored, greedy=replace(scored.greedy, scores_G=scores_G)), BETA)


def test_a_group_teaches_nothing_where_it_scores_as_the_greedy_response_does() -> None:
    scores_B = torch.tensor([0.7, 0.7])
    greedy = GreedyRows(torch.tensor([0.7, 0.1]), torch.tensor([1, 1]), torch.tensor([False, False]))
    even = ScoredBatch(torch.zeros(2), None, None, scores_B, [1, 1], torch.tensor([False, False]), greedy=greedy)
    made = remax(1, PPOConfig(kl=KLConfig(mode="none"))).experience(even, 0.0)
    assert made.advantages_T[0] == 0.0 and made.advantages_T[1] != 0.0
    assert made.stats.equal_groups == 0.5


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


def greedy_response(table: dict[tuple[int, ...], Tensor]) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    while len(tokens) < LONGEST and (not tokens or tokens[-1] != END):
        tokens = (*tokens, int(table[tokens].argmax()))
    return tokens


def test_the_expected_gradient_is_that_without_a_baseline() -> None:
    """A greedy response's baseline leaves the mean gradient over all responses alone; a response's own score does not."""
    prefixes = [tokens for length in range(LONGEST) for tokens in itertools.product(range(1, SYMBOLS), repeat=length)]
    draw = torch.Generator().manual_seed(3)
    table = {each: torch.randn(SYMBOLS, generator=draw, dtype=DOUBLE, requires_grad=True) for each in prefixes}
    reference = {each: torch.randn(SYMBOLS, generator=draw, dtype=DOUBLE) for each in prefixes}
    scores = {tokens: float(torch.randn((), generator=draw, dtype=DOUBLE)) for tokens in responses()}
    greedy = greedy_response(table)

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
        found = expected_gradient(remax(objective=objective), scores[greedy])
        assert (found - plain).abs().max() < 1e-12, objective
    assert (expected_gradient(remax(), None) - plain).abs().max() > 1e-2
