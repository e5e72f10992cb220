"""Log-probs and entropy from vocabulary-parallel logits, the process group given, in float32.

megatron's unfused cross entropy reads the global tensor-parallel group, and its fused one rounds gradients to bfloat16.

Legend: R rows, V vocabulary shard of this rank, q the distribution softmax(logits / temperature) over the whole vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, targets_R: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        parallel = group.size() > 1
        shard = logits_RV.shape[-1]
        local_R = targets_R - group.rank() * shard
        here_R = (local_R >= 0) & (local_R < shard)
        local_R = local_R.clamp(0, shard - 1)
        top_R = logits_RV.amax(-1)
        if parallel:
            dist.all_reduce(top_R, op=dist.ReduceOp.MAX, group=group)
        shifted_RV = logits_RV - top_R[:, None]
        mass_RV = shifted_RV.exp()
        target_R = shifted_RV.gather(-1, local_R[:, None])[:, 0] * here_R
        sums_3R = torch.stack([mass_RV.sum(-1), target_R, (mass_RV * shifted_RV).sum(-1)])
        if parallel:
            dist.all_reduce(sums_3R, group=group)
        mass_R, target_R, weighted_R = sums_3R
        log_mass_R = mass_R.log()
        entropy_R = log_mass_R - weighted_R / mass_R
        logq_RV = shifted_RV.sub_(log_mass_R[:, None])
        ctx.save_for_backward(logq_RV, local_R, here_R, entropy_R)
        return target_R - log_mass_R, entropy_R

    @staticmethod
    def backward(ctx: Any, grad_logp_R: Tensor, grad_entropy_R: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logq_RV, local_R, here_R, entropy_R = ctx.saved_tensors
        # d logp / dx = onehot - q;  d H / dx = -q (log q + H)
        inner_RV = (logq_RV + entropy_R[:, None]).mul_(grad_entropy_R[:, None]).add_(grad_logp_R[:, None])
        grad_RV = logq_RV.exp().mul_(inner_RV).neg_()
        grad_RV.scatter_add_(-1, local_R[:, None], (grad_logp_R * here_R)[:, None])
        return grad_RV, None, None


def token_logprobs(
    logits_RV: Tensor, targets_R: Tensor, group: dist.ProcessGroup, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(log q(target), entropy of q), each [R], equal on every rank of the tensor-parallel `group`.

    A temperature of 0 (greedy decoding) stands for the distribution at temperature 1.
    """
    scaled_RV = logits_RV.float() if temperature in (0.0, 1.0) else logits_RV.float() / temperature
    return _LogProbEntropy.apply(scaled_RV, targets_R, group)
