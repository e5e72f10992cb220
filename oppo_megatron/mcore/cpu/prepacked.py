"""Matrix products with weights packed once in the layout of the CPU's kernels.

For more than a few rows torch's float32 product packs the weights in every call, which in a decode step costs more than the
product itself; its bfloat16 product looks up their layout in every call.  oneDNN, which is part of torch, takes packed weights.
They are a copy, which must be made again after the weights changed.

Legend: T rows, I inputs, O outputs of this tensor rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.cores import processor
from oppo_megatron.layout.cpu_kernels import FEW_ROWS, MOST_ROWS, ROW_MULTIPLE

TYPICAL_ROWS = 16  # a hint for the layout, which serves 1 to `MOST_ROWS` rows
IN_PLACE_ROWS = 3
"""Up to this number of rows torch's float32 product reads the weights in their own layout.

On an Intel processor that takes three quarters of the packed product's time, which is faster from four rows on (Xeon with AMX,
0.1 to 3 M weights).  On others (AMD EPYC), and in bfloat16, the packed one is faster from the first row.
"""


@cache
def by_intel() -> bool:
    """True if torch's own product, MKL's, has its best kernels for this processor."""
    return processor()[0] == "GenuineIntel"


def can_prepack(weight: Tensor) -> bool:
    """True if this build of torch, on this processor, supports packed weights of the tensor's type."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def product(weight_OI: Tensor, bias_O: Tensor | None = None, *, packed: bool) -> Callable[[Tensor], Tensor]:
    """x [T, I] -> x W^T + b [T, O].  `packed`: products of few rows use a packed copy of the weight, made now."""
    if not packed:
        return lambda x_TI: F.linear(x_TI, weight_OI, bias_O)
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), TYPICAL_ROWS)
    bias = None if bias_O is None else bias_O.detach()
    multiply = torch.ops.mkldnn._linear_pointwise.default
    in_place = IN_PLACE_ROWS if weight_OI.dtype == torch.float32 and by_intel() else 0

    def by_rows(x_TI: Tensor) -> Tensor:
        if not in_place < x_TI.shape[0] <= MOST_ROWS:  # beyond, torch's own product has little left to lose
            return F.linear(x_TI, weight_OI, bias_O)
        if x_TI.shape[0] <= FEW_ROWS:  # decoding
            return multiply(x_TI, laid_out, bias, "none", [], "")
        return multiply(_filled_up(x_TI), laid_out, bias, "none", [], "")[: x_TI.shape[0]]

    return by_rows


def _filled_up(x_TI: Tensor) -> Tensor:
    """Pad with arbitrary rows, so that prefill has few sizes.

    oneDNN builds a kernel for each size, which takes as long as a small product, and keeps about a thousand
    (`layout/cpu_kernels.py` counts them).
    """
    num_rows = x_TI.shape[0]
    filled_TI = x_TI.new_empty(-(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE, x_TI.shape[1])
    filled_TI[:num_rows] = x_TI
    return filled_TI
