"""Attention over a paged cache in one kernel, flash-attn's, if it can be used here.

Legend: T packed tokens of a call, S sequences of the call, N query heads, G key/value heads, D head dimension, P blocks,
K positions of a block, W blocks of a table.

The kernel does not run on a CPU.  The tests compare it with `PagedKVCache` without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from oppo_megatron.layout.kernels import FLASH, usable

LEAST_CAPABILITY = (8, 0)
"""The compute capability that FlashAttention-2 needs."""


@dataclass(frozen=True)
class PagedCall:
    """Arguments of a kernel in addition to queries and pools: int32 tensors, and bounds for all sequences.

    Sequence s has `new_S[s]` queries, its last tokens, and `length_S[s]` cached tokens in the blocks `table_SW[s]`.
    """

    table_SW: Tensor
    new_S: Tensor
    length_S: Tensor
    most_new: int
    longest: int

    @cached_property
    def new_ends(self) -> Tensor:
        """[S + 1]: start of each sequence's queries, and the end of the last."""
        return _ends(self.new_S)

    @cached_property
    def length_ends(self) -> Tensor:
        return _ends(self.length_S)


PagedKernel = Callable[[Tensor, Tensor, Tensor, PagedCall, float, int | None], Tensor]
"""(queries [T, N, D], key pool and value pool [P, K, G, D], call, scale, window) -> [T, N, D], causal."""


def find_kernel(device: torch.device, dtype: torch.dtype) -> PagedKernel | None:
    """flash-attn's kernel, or None.  torch's own kernels do not support tables."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return None
    return flash_attn if usable(FLASH) else None


def flash_attn(
    q_TND: Tensor, k_PKGD: Tensor, v_PKGD: Tensor, call: PagedCall, scale: float, window: int | None = None
) -> Tensor:
    """flash-attn (2.5 or newer): its decoding kernel for one query per sequence, else the one for packed queries."""
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    if call.most_new == 1:
        out = flash_attn_with_kvcache(
            q_TND[:, None],
            k_PKGD,
            v_PKGD,
            cache_seqlens=call.length_S,
            block_table=call.table_SW,
            softmax_scale=scale,
            causal=True,
            window_size=_beside(window),
        )
        return out[:, 0]
    return flash_attn_varlen_func(
        q_TND,
        k_PKGD,
        v_PKGD,
        cu_seqlens_q=call.new_ends,
        cu_seqlens_k=call.length_ends,
        max_seqlen_q=call.most_new,
        max_seqlen_k=call.longest,
        softmax_scale=scale,
        causal=True,
        window_size=_beside(window),
        block_table=call.table_SW,
    )


def _beside(window: int | None) -> tuple[int, int]:
    """Positions before and after its own that a token attends to; -1: all."""
    return (-1 if window is None else window - 1, 0)


def _ends(counts_S: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts_S.cumsum(0, dtype=torch.int32), (1, 0))
