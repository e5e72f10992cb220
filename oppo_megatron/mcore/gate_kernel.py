"""Gated activations in Triton: output or gradient in one pass over memory, rounded after the same steps as by torch.

A program computes B numbers of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

KINDS, MOST_NUMBERS = ("silu", "gelu_pytorch_tanh"), 1024


@triton.jit
def _halves(own, width, there, limit, gain, CLAMPED: tl.constexpr):
    """The gate and its factor, clamped; both as they are stored."""
    kind: tl.constexpr = own.dtype.element_ty
    stored_gate = tl.load(own, mask=there, other=0.0).to(tl.float32)
    stored_up = tl.load(own + width, mask=there, other=0.0).to(tl.float32)
    gate, up = stored_gate, stored_up
    if CLAMPED:  # by comparisons that leave NaN
        gate = (tl.where(gate > limit, limit, gate) * gain).to(kind).to(tl.float32)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        up = ((up + 1.0).to(kind).to(tl.float32) / gain).to(kind).to(tl.float32)
    return gate, up, stored_gate, stored_up


@triton.jit
def _activation(gate, GELU: tl.constexpr):
    """gate * sigmoid(inner), with inner = gate for SiLU and a cubic one for GELU by tanh, and its slope."""
    inner, rise = gate, 1.0
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        rise = 1.5957691216057308 * (1 + 3 * 0.044715 * gate * gate)
    share = tl.sigmoid(inner)
    return gate * share, share * (1 + gate * (1 - share) * rise)


@triton.jit
def gate_tile(gate_up, out, width, limit, gain, CLAMPED: tl.constexpr, GELU: tl.constexpr, B: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    gate, up, _, _ = _halves(gate_up + row * 2 * width + column, width, column < width, limit, gain, CLAMPED)
    active, _ = _activation(gate, GELU)
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(out + row * width + column, (active.to(kind).to(tl.float32) * up).to(kind), mask=column < width)


@triton.jit
def gate_grad_tile(gate_up, grad, grads, width, limit, gain, CLAMPED: tl.constexpr, GELU: tl.constexpr, B: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    own, there = row * 2 * width + column, column < width
    kind: tl.constexpr = grads.dtype.element_ty
    gate, up, stored_gate, stored_up = _halves(gate_up + own, width, there, limit, gain, CLAMPED)
    given = tl.load(grad + row * width + column, mask=there, other=0.0).to(tl.float32)
    active, slope = _activation(gate, GELU)
    of_up = (given * active.to(kind).to(tl.float32)).to(kind)
    of_gate = ((given * up).to(kind).to(tl.float32) * slope).to(kind)
    if CLAMPED:
        of_gate = tl.where(stored_gate > limit, 0.0, of_gate.to(tl.float32) * gain).to(kind)
        of_up = tl.where(tl.abs(stored_up) > limit, 0.0, of_up.to(tl.float32) / gain).to(kind)
    tl.store(grads + own, of_gate, mask=there)
    tl.store(grads + own + width, of_up, mask=there)


def triton_gate(gate_up: Tensor, activation: str, clamp: tuple[float, float] | None = None) -> Tensor:
    """`mcore.layers.activated`: [..., 2 F] -> [..., F]."""
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return _launched(gate_tile, out, [gate_up.contiguous(), out], activation, clamp)


def triton_gate_grad(gate_up: Tensor, grad: Tensor, activation: str, clamp: tuple[float, float] | None = None) -> Tensor:
    """Return the gradient of `gate_up`; `grad`: of the output."""
    grads = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    return _launched(gate_grad_tile, grads, [gate_up.contiguous(), grad.contiguous(), grads], activation, clamp)


def _launched(kernel: Any, result: Tensor, tensors: list[Tensor], activation: str, clamp: tuple[float, float] | None) -> Tensor:
    width = tensors[0].shape[-1] // 2
    size = min(MOST_NUMBERS, triton.next_power_of_2(width))
    rows, (limit, gain) = tensors[0].numel() // (2 * width), clamp or (0.0, 1.0)
    limit = torch.tensor(limit, dtype=result.dtype).item()  # as torch compares
    with torch.cuda.device_of(result):
        kernel[(rows, triton.cdiv(width, size))](
            *tensors, width, limit, float(gain), clamp is not None, bool(KINDS.index(activation)), size
        )
    return result
