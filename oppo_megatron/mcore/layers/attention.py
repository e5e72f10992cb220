"""Attention over packed tokens: the interface between a transformer layer and the sequences of its tokens.

Legend: T packed tokens, N query heads, G key/value heads of this tensor rank, D head dimension, S sequences of the call.

A layer passes q, k, v to an `AttentionPlan`, which has the position of each token.  `PackedPlan` below has whole
sequences and no cache (training, full forward); `CachedPlan` (`kv/cached_plan.py`) continues sequences from their cache
(decode and chunked prefill).  Both run through the same layers, so decode, scoring and training share one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.mcore.cpu.cpu_attention import HalfOnCpu
from oppo_megatron.mcore.layers.rope import apply_rope
from oppo_megatron.mcore.layers.windows import WindowedAttention, binding


class AttentionPlan(Protocol):
    """Positions of a call's tokens, and how they attend.  Travels through megatron's layers as `packed_seq_params`."""

    qkv_format: str
    cos_T1D: Tensor
    sin_T1D: Tensor

    def attend(
        self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Rotated, causal attention of one layer -> [T, N * D].  `layer` counts from 0 on this pipeline stage.

        `window`: number of tokens that each token attends to, itself included; None: all before it.
        """


class PackedPlan:
    """Packed whole sequences, causal within each, without padding and cache; differentiable.

    `lengths` are token counts S; the tokens of sequence s follow those of s - 1.
    """

    qkv_format = "thd"

    def __init__(self, lengths: Sequence[int], rope: tuple[Tensor, Tensor]):
        cos_LD, sin_LD = rope
        self.lengths = list(lengths)
        self._through_window: WindowedAttention | None = None  # made when a window binds
        positions_T = torch.cat([torch.arange(n, device=cos_LD.device) for n in self.lengths])
        self.cos_T1D, self.sin_T1D = cos_LD[positions_T].unsqueeze(1), sin_LD[positions_T].unsqueeze(1)

    def attend(
        self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        q_TND = apply_rope(q_TND, self.cos_T1D, self.sin_T1D).to(v_TGD.dtype)
        k_TGD = apply_rope(k_TGD, self.cos_T1D, self.sin_T1D).to(v_TGD.dtype)
        v_TGD = v_TGD.contiguous()  # a view would keep the queries and keys until the backward pass
        outputs = []

        def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            if q.device.type == "cpu" and q.dtype == torch.bfloat16:
                return HalfOnCpu.apply(q, k, v, scale, mask)
            return torch_attention(q, k, v, scale, mask)

        for q, k, v in zip(*(x.split(self.lengths) for x in (q_TND, k_TGD, v_TGD)), strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            bound = binding(window, q.shape[2])
            out = core(q, k, v) if bound is None else self._windowed(v_TGD).attend(core, q, k, v, bound)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _windowed(self, like: Tensor) -> WindowedAttention:
        if self._through_window is None:
            self._through_window = WindowedAttention(like.dtype, like.device)
        return self._through_window


def torch_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """torch's attention, causal if there is no mask."""
    grouped = q.shape[1] != k.shape[1]
    # CUDA's fast kernels for masks, or float32, do not support groups.
    if grouped and q.device.type == "cuda" and (mask is not None or q.dtype == torch.float32):
        repeat = q.shape[1] // k.shape[1]
        # Not `repeat_interleave`, for which the host waits.
        k, v = (x.unsqueeze(2).expand(-1, -1, repeat, -1, -1).flatten(1, 2) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
