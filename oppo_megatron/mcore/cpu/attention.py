"""Attention in bfloat16 on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HalfOnCpu(torch.autograd.Function):
    """torch's attention in bfloat16 on a CPU, causal without a mask, with its backward pass in float32.

    In bfloat16 that takes up to three times as long, and prepares kernels for every length that it meets, of which hundreds of
    megabytes are kept.  The forward pass is the one that cached calls make.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.scale, ctx.mask = scale, mask
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, log_sums = ctx.saved_tensors
        tensors = [x.float() for x in (grad, q, k, v, out)]
        mask = None if ctx.mask is None else ctx.mask.float()
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, log_sums, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None
