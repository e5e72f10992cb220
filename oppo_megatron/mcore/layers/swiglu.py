"""The gated feed-forward's activation (SwiGLU, Shazeer 2020): silu(gate) * up.

megatron-core composes it of a silu, a sum of up and an offset of zero and a product; their results are kept for the backward
pass beside gate and up, and the gradients of gate and up are joined by a copy.  Here only gate and up are kept, and the
silu is computed again: this saves two tensors of the feed-forward size, and some passes.

Legend: T tokens, F feed-forward size of this tensor rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate and up side by side, [T, ..., 2 F] -> [T, ..., F]; differentiable once."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grads = torch.empty_like(gate_up)
        (gate, up), (gate_grad, up_grad) = gate_up.chunk(2, dim=-1), grads.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=up_grad)
        torch.mul(grad, up, out=gate_grad)
        torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate_grad)
        return grads
