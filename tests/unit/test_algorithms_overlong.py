"""A loss that leaves out responses that were cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from torch import Tensor

from oppo_megatron.algorithms.algorithm import Algorithm
from oppo_megatron.algorithms.experience import Experience, ScoredBatch
from oppo_megatron.algorithms.losses import row_weights, shared
from oppo_megatron.algorithms.packed import to_tokens
from oppo_megatron.config.algorithm import AlgorithmConfig, Reduction
from oppo_megatron.config.ppo import PPOConfig

LONGEST = 10


def scored(lengths: Sequence[int], scores: Sequence[float], size: int) -> ScoredBatch:
    return ScoredBatch(
        behaviour_logp_T=-torch.ones(sum(lengths)),
        reference_logp_T=None,
        values_T=None,
        scores_B=torch.tensor(scores),
        lengths_B=list(lengths),
        truncated_B=torch.tensor([length == LONGEST for length in lengths]),
        group_size=size,
    )


def experience(batch: ScoredBatch, *, mask: bool = False) -> Experience:
    choices = AlgorithmConfig.model_validate({"preset": "dr_grpo"})
    return Algorithm(choices, PPOConfig(truncated="mask" if mask else None), batch.group_size, LONGEST).experience(batch, 0.0)


def test_responses_that_leave_the_loss_stay_in_the_mean_of_their_group() -> None:
    batch = scored([2, 10, 3, 3], [1.0, 0.0, 1.0, 0.0], size=2)
    found, plain = experience(batch, mask=True), experience(batch)
    assert found.counted_B is not None and found.counted_B.tolist() == [True, False, True, True]
    assert torch.equal(found.advantages_T, plain.advantages_T) and found.advantages_T[0] == 0.5


def test_equal_groups_are_counted_by_the_scores_that_were_given() -> None:
    batch = scored([2, 10, 3, 3], [1.0, 1.0, 1.0, 0.0], size=2)
    assert experience(batch).stats.equal_groups == 0.5
    assert experience(scored([2, 3], [1.0, 1.0], size=1)).stats.equal_groups is None


def trl_loss(losses: list[Tensor], counted: Sequence[bool], reduction: Reduction, size: int) -> float:
    """`GRPOTrainer._compute_loss` (TRL 1.12.0) over padded rows of one batch; a group's mean as in arXiv 2503.14476 eq. 8."""
    longest = max(map(len, losses))
    per_token_loss, mask = torch.zeros(2, len(losses), longest, dtype=torch.float64)
    for i, row in enumerate(losses):
        per_token_loss[i, : len(row)], mask[i, : len(row)] = row, float(counted[i])
    sums = (per_token_loss * mask).sum(-1)
    if reduction == "token_mean":  # dapo: num_items_in_batch is the mask's sum
        return float(sums.sum() / mask.sum().clamp(min=1.0))
    if reduction == "sequence_mean":  # grpo
        return float((sums / mask.sum(-1).clamp(min=1.0)).mean())
    if reduction == "constant":  # dr_grpo
        return float(sums.sum() / (len(losses) * LONGEST))
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
    weights = row_weights(lengths, 2, reduction, LONGEST, of)
    share_T = to_tokens(torch.tensor(weights, dtype=torch.float64), torch.tensor(lengths), sum(lengths))
    loss = float(shared(torch.cat(losses), share_T).sum() / sum(lengths))
    assert loss == pytest.approx(trl_loss(losses, of, reduction, 2), rel=1e-12, abs=1e-15)
    if counted == "all":
        assert weights == row_weights(lengths, 2, reduction, LONGEST)
        assert reduction != "token_mean" or weights == [1.0] * 6, "plain PPO multiplies by nothing"
