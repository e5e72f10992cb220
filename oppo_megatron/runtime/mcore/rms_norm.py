"""Root-mean-square norm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * w, in float32 inside.

torch has a kernel of it for CUDA.  On a CPU it composes norm and gradient of some twenty-five passes over float32 tensors, and
keeps several of them for the backward pass.  Here they are twelve passes, and the input is kept.

Legend: H features, R rows of [..., H].
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """The norm of each row, in the dtype of `x`; differentiable."""
    if x.device.type != "cpu":
        return F.rms_norm(x, (x.shape[-1],), weight_H, eps)
    return _OnCpu.apply(x, weight_H, eps)


class _OnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        size, wide = x.shape[-1], x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.hypot_(scale.new_tensor(math.sqrt(size * eps))).div_(math.sqrt(size))
        ctx.save_for_backward(x, weight_H, scale)
        return (wide / scale).mul_(weight_H).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight_H, scale = ctx.saved_tensors
        unit, wide, wide_H = x.float() / scale, grad.float(), weight_H.float()
        product_RH = (unit * wide).flatten(0, -2)
        weight_grad_H = None
        if ctx.needs_input_grad[1]:
            weight_grad_H = (product_RH.new_ones(len(product_RH)) @ product_RH).to(weight_H.dtype)
        # d out / d x of a row: (diag(w) - unit (unit * w) / H) / scale
        along = (product_RH @ wide_H).div_(-x.shape[-1]).view_as(scale)
        return (wide * wide_H).addcmul_(unit, along).div_(scale).to(x.dtype), weight_grad_H, None
