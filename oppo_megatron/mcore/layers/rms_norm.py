"""Root-mean-square norm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * w, in float32 inside.

torch has a CUDA kernel for it.  On a CPU torch makes some twenty-five passes over float32 tensors for norm and gradient, and
keeps several of them for the backward pass.  This version makes twelve passes and keeps the input.  The result is
x / hypot(|x|, sqrt(H eps)) * sqrt(H) w, bit-equal in training and in cached calls.

Legend: H features, R rows of [..., H].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Norm = Callable[[Tensor], Tensor]


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """The norm of each row, in the dtype of `x`; differentiable."""
    if x.device.type != "cpu":
        return F.rms_norm(x, (x.shape[-1],), weight_H, eps)
    return _OnCpu.apply(x, weight_H, eps)


def fixed_norm(weight_H: Tensor, eps: float) -> Norm:
    """The norm with a constant weight, without gradient: for cached calls of few rows, in which each operation counts.

    On a CPU it holds a copy of the weight.
    """
    if weight_H.device.type != "cpu":
        return lambda x: F.rms_norm(x, (weight_H.shape[-1],), weight_H, eps)
    floor, scaled_H = _constants(weight_H, eps)
    return lambda x: _normalised(x.float(), floor, scaled_H)[0].to(x.dtype)


def _constants(weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """sqrt(H eps), and sqrt(H) w."""
    size, wide_H = weight_H.shape[-1], weight_H.detach().float()
    return wide_H.new_full((), math.sqrt(size * eps)), wide_H * math.sqrt(size)


def _normalised(wide: Tensor, floor: Tensor, scaled_H: Tensor) -> tuple[Tensor, Tensor]:
    """The norm, and the divisor of each row, [..., 1]."""
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(floor)
    return (wide / length).mul_(scaled_H), length


class _OnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        floor, scaled_H = _constants(weight_H, eps)
        out, length = _normalised(x.float(), floor, scaled_H)
        ctx.save_for_backward(x, length, scaled_H)
        ctx.weight_dtype = weight_H.dtype
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, length, scaled_H = ctx.saved_tensors
        unit, wide = x.float() / length, grad.float()
        product_RH = (unit * wide).flatten(0, -2)
        weight_grad_H = None
        if ctx.needs_input_grad[1]:
            roots_R = product_RH.new_full((len(product_RH),), math.sqrt(len(scaled_H)))
            weight_grad_H = (product_RH.t() @ roots_R).to(ctx.weight_dtype)
        # a row's output is scaled * unit, and d unit / d x = (1 - unit unit^T) / length
        along = (product_RH @ scaled_H).neg_().view_as(length)
        return (wide * scaled_H).addcmul_(unit, along).div_(length).to(x.dtype), weight_grad_H, None
