"""CPU kernels: attention in bfloat16 and packed products.  Legend: T rows, I inputs, O outputs of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.config.model import Dtype
from oppo_megatron.cores import processor
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.memory import FEW_ROWS, MOST_ROWS, ROW_MULTIPLE, WHOLE_MULTIPLE


class HalfOnCpu(torch.autograd.Function):
    """torch's CPU attention in bfloat16; its float32 backward is faster."""

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


CALL_NUMBERS = 2**16  # cached numbers read in the overhead of one attention call


def blocks(sizes: Sequence[tuple[int, ...]], call: float, first: int = 0) -> list[slice]:
    """Cut rows into blocks if that saves more than `call`, a block's own cost; a row costs the product of its block's maxima."""
    left, right = _costs(sizes), _costs(sizes[::-1])[::-1]
    costs = [n * left[n - 1] + (len(sizes) - n) * right[n] for n in range(1, len(sizes))]
    if not costs or min(costs) + call >= len(sizes) * left[-1]:
        return [slice(first, first + len(sizes))]
    count = 1 + costs.index(min(costs))
    return [*blocks(sizes[:count], call, first), *blocks(sizes[count:], call, first + count)]


def _costs(rows: Sequence[tuple[int, ...]]) -> list[int]:
    largest = [accumulate(column, max) for column in zip(*rows, strict=True)]
    return [prod(each) for each in zip(*largest, strict=True)]


TYPICAL_ROWS = 16  # a hint for the layout, which serves 1 to `MOST_ROWS` rows
IN_PLACE_ROWS = 3  # on an Intel processor torch's float32 product of at most 3 rows is faster than the packed one


@cache
def by_intel() -> bool:
    return processor()[0] == "GenuineIntel"


def can_prepack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def row_multiple(weight: Tensor) -> int:
    """Return the multiple of rows to compute; oneDNN keeps a kernel (about 1 MiB) per number of rows."""
    return WHOLE_MULTIPLE if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 else 1


def product(weight_OI: Tensor, bias_O: Tensor | None = None, *, packed: bool) -> Callable[[Tensor], Tensor]:
    """Return x [T, I] -> x W^T + b [T, O]; `packed`: by oneDNN's weight copy for few rows."""
    if not packed:
        return lambda x_TI: F.linear(x_TI, weight_OI, bias_O)
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), TYPICAL_ROWS)
    bias = None if bias_O is None else bias_O.detach()
    multiply = torch.ops.mkldnn._linear_pointwise.default
    in_place = IN_PLACE_ROWS if weight_OI.dtype == torch.float32 and by_intel() else 0

    def by_rows(x_TI: Tensor) -> Tensor:
        if not in_place < x_TI.shape[0] <= MOST_ROWS:
            return F.linear(x_TI, weight_OI, bias_O)
        if x_TI.shape[0] <= FEW_ROWS:  # decoding
            return multiply(x_TI, laid_out, bias, "none", [], "")
        return multiply(_filled_up(x_TI), laid_out, bias, "none", [], "")[: x_TI.shape[0]]

    return by_rows


def _filled_up(x_TI: Tensor) -> Tensor:
    """Add arbitrary rows: oneDNN builds a kernel per size."""
    num_rows = x_TI.shape[0]
    filled_TI = x_TI.new_empty(-(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE, x_TI.shape[1])
    filled_TI[:num_rows] = x_TI
    return filled_TI


PACKING = ("mkldnn._reorder_linear_weight", "mkldnn._linear_pointwise", "mkldnn._is_mkldnn_bf16_supported")
HALF_ATTENTION = ("aten._scaled_dot_product_flash_attention_for_cpu", "aten._scaled_dot_product_flash_attention_for_cpu_backward")


def require_private_ops(dtypes: set[Dtype]) -> None:
    """Raise ConfigError naming undocumented operations that torch lacks."""
    needed: list[tuple[str, str, str]] = []
    if torch.backends.mkldnn.is_available():
        needed += [("decoding on a CPU", "use a GPU", name) for name in PACKING]
    if "bfloat16" in dtypes:
        needed += [("bfloat16 on a CPU", "set runtime.dtype to float32", name) for name in HALF_ATTENTION]
    problems = [
        f"{setting} calls torch.ops.{name}, which torch {torch.__version__} does not have; {instead}, or install another "
        "torch, 2.6 or newer"
        for setting, instead, name in needed
        if not hasattr(getattr(torch.ops, name.split(".")[0]), name.split(".")[1])
    ]
    if problems:
        raise ConfigError(problems)
