"""Vocabulary-parallel log-probs on this rank's shard of the logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.runtime.mcore.vocab_parallel import token_logprobs
from tests.gloo.models import gather_logits


def shard_results(
    logits_RV: Tensor, targets_R: Tensor, temperature: float, weights_2R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropies, this shard's gradient of weights . (log-probs, entropies))."""
    group = dist.group.WORLD
    assert group is not None
    shard_RV = logits_RV.chunk(group.size(), dim=-1)[group.rank()].clone().requires_grad_()
    before_RV = shard_RV.detach().clone()
    logprobs_R, entropy_R = token_logprobs(shard_RV, targets_R, group, temperature)
    (weights_2R * torch.stack([logprobs_R, entropy_R])).sum().backward()
    assert torch.equal(shard_RV, before_RV), "the logits are the caller's"
    assert torch.equal(gather_logits(before_RV, group), logits_RV)
    assert shard_RV.grad is not None
    return logprobs_R.detach(), entropy_R.detach(), shard_RV.grad


def many(cases: list[tuple[Tensor, Tensor, float, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [shard_results(*case) for case in cases]


def finite_differences(
    logits_RV: Tensor, targets_R: Tensor, temperature: float, weights_2R: Tensor, step: float
) -> Tensor:
    """Central differences of weights . (log-probs, entropies) by every logit of the whole vocabulary."""
    group = dist.group.WORLD
    assert group is not None

    def value(changed_RV: Tensor) -> Tensor:
        shard_RV = changed_RV.chunk(group.size(), dim=-1)[group.rank()]
        both = torch.stack(token_logprobs(shard_RV, targets_R, group, temperature))
        return (weights_2R * both).double().sum()

    slopes = torch.zeros_like(logits_RV)
    for place in range(logits_RV.numel()):
        offset = torch.zeros(logits_RV.numel())
        offset[place] = step
        offset_RV = offset.view_as(logits_RV)
        slopes.view(-1)[place] = (value(logits_RV + offset_RV) - value(logits_RV - offset_RV)) / (2 * step)
    return slopes
