"""Attention over packed tokens: rotary positions, sliding windows and the plan of a call.

Legend: T packed tokens, N query heads, G key/value heads, D head dimension, L cached positions, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oppo_megatron.layout.model_shape import ModelShape
from oppo_megatron.mcore.cpu import HalfOnCpu


def rope_tables(shape: ModelShape, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return float32 cos_LD and sin_LD (Su et al. 2021), the sine negated in the first half of D."""
    frequencies, factor = _frequencies(shape)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies.float())
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat([cos, cos], dim=-1).to(device), torch.cat([-sin, sin], dim=-1).to(device)


def _frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    kind = shape.rope["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        return 1.0 / (float(shape.rope["rope_theta"]) ** exponents), 1.0
    # Most models need none of it, and to load the library takes a second.
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.for_model(**dict(shape.hf))
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


def apply_rope(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate: (a, b) -> (a cos - b sin, b cos + a sin)."""
    return torch.addcmul(x_TND * cos_T1D, x_TND.roll(x_TND.shape[-1] // 2, -1), sin_T1D)


LEAST_PIECE, MOST_PIECE = 64, 1024
"""Bounds of a piece's queries, otherwise the window's size."""

Core = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(queries [1, N, Q, D], keys and values [1, G, K, D], mask [Q, K]) -> [1, N, Q, D]."""


def binding(window: int | None, reach: int) -> int | None:
    return window if window is not None and window < reach else None


@dataclass
class WindowedAttention:
    """Attention in pieces of queries that read few keys beyond their window."""

    dtype: torch.dtype
    device: torch.device
    _masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def attend(self, core: Core, q_1NTD: Tensor, k_1GLD: Tensor, v_1GLD: Tensor, window: int) -> Tensor:
        """The queries are the last T of L positions -> [1, N, T, D]."""
        new, reach = q_1NTD.shape[2], k_1GLD.shape[2]
        outputs = []
        for queries, keys in pieces(new, reach, window, window_size(window)):
            mask_QK = self._mask(queries.stop - queries.start, keys.stop - keys.start, window)
            outputs.append(core(q_1NTD[:, :, queries], k_1GLD[:, :, keys], v_1GLD[:, :, keys], mask_QK))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _mask(self, queries: int, keys: int, window: int) -> Tensor:
        key = (queries, keys, window)
        if key not in self._masks:
            own = keys - queries  # the key of the first query
            behind_QK, before_QK = (
                torch.full((queries, keys), -torch.inf, dtype=self.dtype, device=self.device) for _ in range(2)
            )
            self._masks[key] = behind_QK.triu_(own + 1) + before_QK.tril_(own - window)
        return self._masks[key]


def window_size(window: int) -> int:
    return min(max(window, LEAST_PIECE), MOST_PIECE)


def pieces(new: int, reach: int, window: int | None, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield at most `size` of the last `new` queries of `reach` positions, and the keys that they attend to."""
    past = reach - new
    for first in range(0, new, size):
        stop = min(first + size, new)
        yield slice(first, stop), slice(0 if window is None else max(0, past + first + 1 - window), past + stop)


class AttentionPlan(Protocol):
    """A call's positions and attention, passed on by megatron's layers as `packed_seq_params`."""

    qkv_format: str
    cos_T1D: Tensor
    sin_T1D: Tensor

    def attend(self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, window: int | None = None) -> Tensor:
        """Rotated, causal attention of one layer -> [T, N * D].  `window`: tokens attended to, own included; None: all before."""


class PackedPlan:
    """Packed whole sequences, causal within each; differentiable."""

    qkv_format = "thd"

    def __init__(self, lengths: Sequence[int], rope: tuple[Tensor, Tensor]):
        cos_LD, sin_LD = rope
        self.lengths = list(lengths)
        self._through_window: WindowedAttention | None = None  # made when a window binds
        positions_T = torch.cat([torch.arange(n, device=cos_LD.device) for n in self.lengths])
        self.cos_T1D, self.sin_T1D = cos_LD[positions_T].unsqueeze(1), sin_LD[positions_T].unsqueeze(1)

    def attend(self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, window: int | None = None) -> Tensor:
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
    grouped = q.shape[1] != k.shape[1]
    # CUDA's fast kernels for masks, or float32, do not support groups.
    if grouped and q.device.type == "cuda" and (mask is not None or q.dtype == torch.float32):
        repeat = q.shape[1] // k.shape[1]
        # Not `repeat_interleave`, for which the host waits.
        k, v = (x.unsqueeze(2).expand(-1, -1, repeat, -1, -1).flatten(1, 2) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)
