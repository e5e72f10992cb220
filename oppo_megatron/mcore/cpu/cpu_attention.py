"""Attention on a CPU: the operation in bfloat16, and which sequences of a call attend together.

Neighbouring sequences that attend together all read the positions of the longest: reading past the end of a shorter one is
wasted, but a separate call costs time, too.  Sequences admitted together have similar lengths and neighbouring slots, so a few
cuts save most of the waste.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor


class HalfOnCpu(torch.autograd.Function):
    """torch's attention in bfloat16 on a CPU, causal without a mask, with its backward pass in float32.

    In bfloat16 a backward pass takes up to three times as long, and keeps hundreds of megabytes of kernels, one for every
    length.  The forward pass is that of cached calls.
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


CALL_NUMBERS = 2**16
"""Cached numbers that can be read in the overhead of one attention call."""


def stretches(lengths: Sequence[int], call: float) -> list[slice]:
    """Cut rows wherever that saves more than `call` positions, the cost of one attention call, greedily by the best cut."""
    return blocks([(length,) for length in lengths], call)


def blocks(sizes: Sequence[tuple[int, ...]], call: float) -> list[slice]:
    """As `stretches`, for rows with several sizes: each row costs the product of the largest sizes in its block."""
    return [slice(first, end) for first, end in _cut(sizes, 0, len(sizes), call)]


def _cut(sizes: Sequence[tuple[int, ...]], first: int, end: int, call: float) -> list[tuple[int, int]]:
    rows = sizes[first:end]
    left, right = _costs(rows), _costs(rows[::-1])[::-1]
    costs = [n * left[n - 1] + (len(rows) - n) * right[n] for n in range(1, len(rows))]
    if not costs or min(costs) + call >= len(rows) * left[-1]:
        return [(first, end)]
    middle = first + 1 + costs.index(min(costs))
    return [*_cut(sizes, first, middle, call), *_cut(sizes, middle, end, call)]


def _costs(rows: Sequence[tuple[int, ...]]) -> list[int]:
    """Cost of a row in a block with all rows before it."""
    largest = [accumulate(column, max) for column in zip(*rows, strict=True)]
    return [prod(each) for each in zip(*largest, strict=True)]
