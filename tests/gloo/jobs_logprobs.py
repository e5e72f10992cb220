"""Vocabulary-parallel log-probs on this rank's shard of the logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.layout.layouts import vocab_rows
from oppo_megatron.mcore.vocab import VocabShards, token_logprobs
from tests.gloo.models import gather_logits


def shards_of(vocab_size: int) -> VocabShards:
    """Over all ranks of the job."""
    return VocabShards(dist.group.WORLD, vocab_rows(vocab_size, dist.get_world_size()), vocab_size)


def shard_results(logits_RV: Tensor, targets_R: Tensor, temperature: float, weights_2R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropies, this shard's gradient of weights . (log-probs, entropies))."""
    vocab = shards_of(logits_RV.shape[-1])
    shard_RV = logits_RV.split(vocab.rows, dim=-1)[vocab.rank].clone().requires_grad_()
    before_RV = shard_RV.detach().clone()
    logprobs_R, entropy_R = token_logprobs(shard_RV, targets_R, vocab, temperature)
    (weights_2R * torch.stack([logprobs_R, entropy_R])).sum().backward()
    assert torch.equal(shard_RV, before_RV), "the logits are the caller's"
    assert torch.equal(gather_logits(before_RV, vocab), logits_RV)
    assert shard_RV.grad is not None
    return logprobs_R.detach(), entropy_R.detach(), shard_RV.grad


def many(cases: list[tuple[Tensor, Tensor, float, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [shard_results(*case) for case in cases]


def finite_differences(logits_RV: Tensor, targets_R: Tensor, temperature: float, weights_2R: Tensor, step: float) -> Tensor:
    """Central differences of weights . (log-probs, entropies) by every logit of the whole vocabulary."""
    vocab = shards_of(logits_RV.shape[-1])

    def value(changed_RV: Tensor) -> Tensor:
        shard_RV = changed_RV.split(vocab.rows, dim=-1)[vocab.rank]
        both = torch.stack(token_logprobs(shard_RV, targets_R, vocab, temperature))
        return (weights_2R * both).double().sum()

    slopes = torch.zeros_like(logits_RV)
    for place in range(logits_RV.numel()):
        offset = torch.zeros(logits_RV.numel())
        offset[place] = step
        offset_RV = offset.view_as(logits_RV)
        slopes.view(-1)[place] = (value(logits_RV + offset_RV) - value(logits_RV - offset_RV)) / (2 * step)
    return slopes
