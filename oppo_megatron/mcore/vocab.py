"""The vocabulary over tensor ranks; log-probs and entropy from sharded logits in float32.

megatron's cross entropies read a global group or round gradients, and use more memory.
Legend: R rows, V vocabulary shard, S shards, q = softmax(logits / temperature) over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.layout.activations import BLOCK_NUMBERS, CACHED_NUMBERS


class VocabShards:
    """This rank's `rows` rows (the last may be padded)."""

    def __init__(self, group: dist.ProcessGroup | None = None, rows: int = 0, vocab_size: int | None = None):
        self.group, self.rows, self.vocab_size = group, rows, vocab_size
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.num_tokens = rows if vocab_size is None else min(rows, vocab_size - self.first)
        assert self.num_tokens > 0 or group is None, f"no token of {vocab_size} on rank {self.rank} of {self.size}"

    @property
    def first(self) -> int:
        return self.rank * self.rows

    def of_tokens(self, rows_RV: Tensor) -> Tensor:
        return rows_RV if self.num_tokens == self.rows else rows_RV[..., : self.num_tokens]

    def filled_up(self, logits_RV: Tensor) -> Tensor:
        missing = self.rows - self.num_tokens
        return F.pad(logits_RV, (0, missing), value=-torch.inf) if missing and self.size > 1 else logits_RV

    def globally(self, tokens: Tensor) -> Tensor:
        return tokens + self.first

    def gather(self, mine: Tensor) -> Tensor:
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine.contiguous(), group=self.group)
        return torch.stack(found)

    def add(self, mine: Tensor) -> Tensor:
        """Sum over ranks; overwrites `mine`."""
        dist.all_reduce(mine, group=self.group)
        return mine


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, targets_R: Tensor, shards: VocabShards, temperature: float) -> tuple[Tensor, Tensor]:
        shard = logits_RV.shape[-1]
        local_R = targets_R - shards.first
        here_R = (local_R >= 0) & (local_R < shard)
        local_R = local_R.clamp(0, shard - 1)
        top_R = logits_RV.amax(-1).float() / temperature
        if shards.size > 1:
            dist.all_reduce(top_R, op=dist.ReduceOp.MAX, group=shards.group)
        sums_3R = top_R.new_empty(3, len(top_R))
        for rows in _blocks(logits_RV):
            shifted_BV = _scaled(logits_RV[rows], temperature).sub_(top_R[rows, None])
            sums_3R[1, rows] = shifted_BV.gather(-1, local_R[rows, None])[:, 0] * here_R[rows]
            mass_BV = shifted_BV.exp()
            sums_3R[0, rows] = mass_BV.sum(-1)
            sums_3R[2, rows] = mass_BV.mul_(shifted_BV).sum(-1)
            del shifted_BV, mass_BV  # or they would be held while the next rows' are made
        if shards.size > 1:
            dist.all_reduce(sums_3R, group=shards.group)
        mass_R, target_R, weighted_R = sums_3R
        log_mass_R = mass_R.log()
        entropy_R = log_mass_R - weighted_R / mass_R
        ctx.save_for_backward(logits_RV, local_R, here_R, top_R, log_mass_R, entropy_R)
        ctx.temperature = temperature
        return target_R - log_mass_R, entropy_R

    @staticmethod
    def backward(ctx: Any, grad_logp_R: Tensor, grad_entropy_R: Tensor) -> tuple[Tensor, None, None, None]:
        logits_RV, local_R, here_R, top_R, log_mass_R, entropy_R = ctx.saved_tensors
        pulled_R = grad_logp_R * here_R
        grad_RV = torch.empty_like(logits_RV)
        for rows in _blocks(logits_RV):
            logq_BV = _scaled(logits_RV[rows], ctx.temperature).sub_(top_R[rows, None]).sub_(log_mass_R[rows, None])
            # d logp / dx = onehot - q;  d H / dx = -q (log q + H)
            inner_BV = (logq_BV + entropy_R[rows, None]).mul_(grad_entropy_R[rows, None]).add_(grad_logp_R[rows, None])
            grad_BV = logq_BV.exp_().mul_(inner_BV).neg_()
            grad_BV.scatter_add_(-1, local_R[rows, None], pulled_R[rows, None])
            grad_RV[rows] = grad_BV if ctx.temperature == 1.0 else grad_BV.div_(ctx.temperature)
            del logq_BV, inner_BV, grad_BV
        return grad_RV, None, None, None


def _blocks(logits_RV: Tensor) -> Iterator[slice]:
    size = _block_rows(logits_RV)
    return (slice(first, first + size) for first in range(0, len(logits_RV), size))


def _block_rows(logits_RV: Tensor) -> int:
    return max(1, (CACHED_NUMBERS if logits_RV.device.type == "cpu" else BLOCK_NUMBERS) // logits_RV.shape[-1])


def _scaled(logits_BV: Tensor, temperature: float) -> Tensor:
    copied_BV = logits_BV.to(torch.float32, copy=True)
    return copied_BV if temperature == 1.0 else copied_BV.div_(temperature)


def token_logprobs(logits_RV: Tensor, targets_R: Tensor, shards: VocabShards, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log q(target) and entropy of q, each [R], equal on every rank; temperature 0 means 1."""
    return _LogProbEntropy.apply(logits_RV, targets_R, shards, temperature or 1.0)


def largest_logits(logits_RV: Tensor, shards: VocabShards) -> Tensor:
    """Return [R], equal on every rank; no gradient."""
    logits_RV = logits_RV.detach()
    largest_R = torch.maximum(logits_RV.amax(-1), -logits_RV.amin(-1)).float()
    if shards.size > 1:
        dist.all_reduce(largest_R, op=dist.ReduceOp.MAX, group=shards.group)
    return largest_R


def likeliest_share(logits_RV: Tensor, targets_R: Tensor, shards: VocabShards) -> Tensor:
    """Return 1 / n if the target is among the n likeliest (within rounding), else 0, [R], equal on every rank."""
    local_R = targets_R - shards.first
    here_R = (local_R >= 0) & (local_R < logits_RV.shape[-1])
    target_R = logits_RV.gather(-1, local_R.clamp(0, logits_RV.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    top_R, target_R = logits_RV.amax(-1), target_R.where(here_R, -torch.inf)
    if shards.size > 1:
        for over_all_R in (top_R, target_R):
            dist.all_reduce(over_all_R, op=dist.ReduceOp.MAX, group=shards.group)
    tie = max(4 * torch.finfo(torch.float32).eps, torch.finfo(logits_RV.dtype).eps)
    least_R = top_R - tie * top_R.abs()
    blocks = zip(logits_RV.split(_block_rows(logits_RV)), least_R.split(_block_rows(logits_RV)), strict=True)
    # The sum makes a float32 of each comparison.
    count_R = torch.cat([(block_BV >= least_B.unsqueeze(-1)).sum(-1, dtype=torch.float32) for block_BV, least_B in blocks])
    if shards.size > 1:
        dist.all_reduce(count_R, group=shards.group)
    return (target_R >= least_R) / count_R
