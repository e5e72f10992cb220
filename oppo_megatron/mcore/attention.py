"""Attention over packed tokens: rotary positions, sliding windows and soft caps.

Legend: T packed tokens, N query heads, G key/value heads, D head dimension, L cached positions, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, partial
from inspect import signature
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from oppo_megatron.layout.activations import COMPOSED_NUMBERS, PIECE
from oppo_megatron.layout.families import BESIDE_ROPE
from oppo_megatron.layout.kernels import FLASH, usable
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore.cpu import HalfOnCpu
from oppo_megatron.mcore.device import on_device

NO_PREFIXES: Mapping[int, int] = MappingProxyType({})


def rope_tables(shape: ModelShape, num_positions: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return float32 cos_LD and sin_LD (Su et al. 2021), negated in the first half of D, for each of `shape.ropes` in turn.

    Long RoPE has its long factors if `num_positions` exceed the original ones, for all positions.
    """
    tables: list[Tensor] = []
    for rope in shape.ropes:
        kind, factor = rope["rope_type"], 1.0
        if kind == "default":
            exponents = torch.arange(0, shape.rotary_dim, 2, dtype=torch.int64).float() / shape.rotary_dim
            frequencies = 1.0 / (float(rope["rope_theta"]) ** exponents)
        else:
            from transformers import LlamaConfig
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            beside = {key: value for key, value in shape.hf.items() if key in BESIDE_ROPE and value}
            config = LlamaConfig(  # for any family: its own class would check the whole `config.json`
                hidden_size=shape.num_heads * shape.head_dim, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
                rope_theta=rope["rope_theta"], rope_scaling=dict(rope),
                **{"max_position_embeddings": shape.traits.positions} | beside,
            )  # fmt: skip
            of_length = {"seq_len": num_positions} if kind == "longrope" else {}
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **of_length)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies.float())
        cos, sin = angles.cos() * factor, angles.sin() * factor
        tables += [torch.cat([cos, cos], dim=-1).to(device), torch.cat([-sin, sin], dim=-1).to(device)]
    return tuple(tables)


def apply_rope(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate: (a, b) -> (a cos - b sin, b cos + a sin), only the first numbers of a head if the tables have fewer."""
    if (turned := cos_T1D.shape[-1]) < x_TND.shape[-1]:
        return torch.cat([apply_rope(x_TND[..., :turned], cos_T1D, sin_T1D), x_TND[..., turned:]], dim=-1)
    return torch.addcmul(x_TND * cos_T1D, x_TND.roll(x_TND.shape[-1] // 2, -1), sin_T1D)


class Reading(NamedTuple):
    """How a layer attends: the scale of its logits, tokens it reads (own included), their soft cap, its RoPE table, sinks."""

    scale: float
    window: int | None = None
    cap: float | None = None
    table: int = 0
    sinks: Tensor | None = None


LEAST_CAPABILITY = (8, 0)  # of GPUs that flash-attn and Triton's bfloat16 need
LEAST_PIECE, MOST_PIECE = 64, 1024  # bounds of a piece's queries, otherwise the window's size


def binding(window: int | None, reach: int) -> int | None:
    return window if window is not None and window < reach else None


def window_size(window: int | None) -> int:
    return PIECE if window is None else min(max(window, LEAST_PIECE), MOST_PIECE)


def pieces(new: int, reach: int, window: int | None, size: int) -> Iterator[tuple[slice, slice]]:
    """Cut the last `new` of `reach` positions into at most `size` queries each; yield these and the keys that they see."""
    past = reach - new
    for first in range(0, new, size):
        stop = min(first + size, new)
        yield slice(first, stop), slice(0 if window is None else max(0, past + first + 1 - window), past + stop)


Ends = tuple[Tensor, int]
"""Ends of packed sequences from 0 on, and the longest."""

VarlenKernel = Callable[..., Any]
"""(queries [T, N, D], keys, values, ends of queries, ends of keys, scale, window) -> [T, N, D], causal from the last key on.

With `log_sums`: the logarithms of the softmaxes' sums [N, T] too.
"""


def varlen_kernel(q_TND: Tensor, cap: float | None = None) -> VarlenKernel | None:
    """Attention of all packed sequences in one call: torch's from 2.11 on, which has no soft cap, or flash-attn's."""
    if q_TND.device.type != "cuda" or q_TND.dtype == torch.float32 or q_TND.shape[-1] % 8 or q_TND.shape[-1] > 256:
        return None
    if torch.cuda.get_device_capability(q_TND.device) < LEAST_CAPABILITY:
        return None
    if cap is not None:
        return partial(flash_varlen, softcap=cap) if usable(FLASH) else None
    return torch_varlen() or (flash_varlen if usable(FLASH) else None)


def flash_varlen(
    q: Tensor, k: Tensor, v: Tensor, of_q: Ends, of_k: Ends, scale: float, window: int | None, *, log_sums: bool = False,
    **options: float,
) -> Any:  # fmt: skip
    from flash_attn import flash_attn_varlen_func

    (ends_q, most_q), (ends_k, most_k), before = of_q, of_k, -1 if window is None else window - 1
    found = flash_attn_varlen_func(
        q, k, v, ends_q, ends_k, most_q, most_k, softmax_scale=scale, causal=True, window_size=(before, 0),
        return_attn_probs=log_sums, **options,
    )  # fmt: skip
    return found[:2] if log_sums else found


@cache
def torch_varlen() -> VarlenKernel | None:
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    known = signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= known.keys():
        return None
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}

    def attend(
        q: Tensor, k: Tensor, v: Tensor, of_q: Ends, of_k: Ends, scale: float, window: int | None, *, log_sums: bool = False
    ) -> Any:
        (ends_q, most_q), (ends_k, most_k), size = of_q, of_k, (-1 if window is None else window - 1, 0)
        more: dict[str, Any] = {"return_aux": AuxRequest(lse=True)} if log_sums else {}
        return varlen_attn(q, k, v, ends_q, ends_k, most_q, most_k, scale=scale, window_size=size, **grouped, **more)

    return attend


class WithSinks(torch.autograd.Function):
    """Give the output and the log-sums of a kernel's attention a softmax with sinks, in place.

    A kernel's backward pass reads both: with these it yields the gradients of queries, keys and values under sinks.
    """

    @staticmethod
    def forward(ctx: Any, out_TND: Tensor, log_sums_NT: Tensor, sinks_N: Tensor) -> Tensor:
        whole_NT = torch.logaddexp(log_sums_NT, sinks_N.float().unsqueeze(1))
        out_TND.data.mul_((log_sums_NT - whole_NT).exp().t().unsqueeze(-1))  # `data`: the kernel's graph keeps both, unchanged
        log_sums_NT.data.copy_(whole_NT)
        ctx.save_for_backward(out_TND, log_sums_NT, sinks_N)
        return out_TND.view_as(out_TND)

    @staticmethod
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor, None, Tensor]:
        out_TND, log_sums_NT, sinks_N = ctx.saved_tensors
        share_NT = (sinks_N.float().unsqueeze(1) - log_sums_NT).exp()
        along_TN = (grad_TND.float() * out_TND.float()).sum(-1)
        return grad_TND, None, (share_NT * along_TN.t()).sum(1).neg_().to(sinks_N.dtype)


class AttentionPlan(Protocol):
    """A call's attention, megatron's `packed_seq_params`, and the experts of its tokens."""

    qkv_format: str
    routing: Any
    waits: bool  # the host may wait for the device in this call

    def attend(
        self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, window: int | None = None,
        cap: float | None = None, table: int = 0, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Rotated, causal attention (`Reading`) -> [T, N * D]."""


@contextmanager
def joined(*parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield concatenations; operations of the block keep the parts until the backward pass, which joins them again."""
    whole = [own[0] if len(own) == 1 else torch.cat(list(own)) for own in parts]
    known = {x.untyped_storage()._cdata: [part.detach() for part in own] for x, own in zip(whole, parts, strict=True)}

    def pack(x: Tensor) -> Any:
        own = known.get(x.untyped_storage()._cdata)
        return x.detach() if own is None else (own, x.size(), x.stride(), x.storage_offset())

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else torch.cat(kept[0]).as_strided(*kept[1:])

    with nullcontext() if all(len(own) == 1 for own in parts) else saved_tensors_hooks(pack, unpack):
        yield whole


class CausalSpans:
    """Attention of the last `new` of `reach` positions of each packed sequence to those before them.

    Keys are given for all positions, but the first keys of sequence s are in sequence `prefixes[s]`, if there is one.
    """

    def __init__(self, new: Sequence[int], reach: Sequence[int], device: torch.device, prefixes: Mapping[int, int] = NO_PREFIXES):
        self.new, self.reach, self.prefixes, self._device = list(new), list(reach), prefixes, device
        self._whole_masks: dict[int | None, Tensor] = {}
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(
        self, q_TND: Tensor, k_KGD: Tensor, v_KGD: Tensor, scale: float, window: int | None, cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Differentiable -> [T, N, D]."""
        if (kernel := varlen_kernel(q_TND, cap)) is not None:
            all_k, all_v = ([part for own in self._seen(x) for part in own] if self.prefixes else [x] for x in (k_KGD, v_KGD))
            with joined(all_k, all_v) as (k, v):
                call = q_TND, k, v, *self._ends, scale, binding(window, max(self.reach))
                if sinks is None:
                    return kernel(*call)
                return WithSinks.apply(*kernel(*call, log_sums=True), sinks)
        outputs = []
        half = v_KGD.device.type == "cpu" and v_KGD.dtype == torch.bfloat16 and cap is None and sinks is None
        core = HalfOnCpu.apply if half else partial(torch_attention, cap=cap, sinks=sinks)
        for q, own_k, own_v in zip(q_TND.split(self.new), self._seen(k_KGD), self._seen(v_KGD), strict=True):
            with joined(own_k, own_v) as (k, v):
                q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
                new, reach = q.shape[2], k.shape[2]
                bound = binding(window, reach)
                if bound is None and new == reach:
                    out = core(q, k, v, scale, None)
                else:
                    parts = [
                        core(q[:, :, queries], k[:, :, keys], v[:, :, keys], scale, self._mask(queries, keys, bound, v))
                        for queries, keys in pieces(new, reach, bound, window_size(bound))
                    ]
                    out = torch.cat(parts, dim=2)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def _seen(self, x_KGD: Tensor) -> Iterator[list[Tensor]]:
        """Yield the parts that each sequence attends to."""
        parts = x_KGD.split(self.new if self.prefixes else self.reach)
        return ([parts[self.prefixes[s]], part] if s in self.prefixes else [part] for s, part in enumerate(parts))

    @cached_property
    def _ends(self) -> tuple[Ends, Ends]:
        of_q, of_k = (
            (on_device([0, *accumulate(x)], self._device, torch.int32), max(x)) if x else None
            for x in (self.new, self.reach if self.reach != self.new else [])
        )
        assert of_q is not None
        return of_q, of_k or of_q

    def _mask(self, queries: slice, keys: slice, window: int | None, like: Tensor) -> Tensor:
        """The last rows and columns of one mask per window, since the last query sees the last key."""
        key = rows, columns, _ = queries.stop - queries.start, keys.stop - keys.start, window
        if window not in self._whole_masks:
            size = window_size(window)
            most = max(self.reach) if window is None else min(max(self.reach), window + size - 1)
            whole_QK = self._whole_masks[window] = like.new_full((size, most), -torch.inf).triu_(most - size + 1)
            if window is not None:
                whole_QK += torch.full_like(whole_QK, -torch.inf).tril_(most - size - window)
        if key not in self._masks:
            view_QK = self._whole_masks[window][-rows:, -columns:]
            self._masks[key] = view_QK.contiguous() if like.device.type == "cuda" else view_QK  # its kernel asks for alignment
        return self._masks[key]


class PackedPlan:
    """Causal within each packed sequence; differentiable.  Sequence s continues sequence `prefixes[s]`, if there is one."""

    qkv_format = "thd"
    routing: Any = None
    waits = True

    def __init__(self, lengths: Sequence[int], rope: tuple[Tensor, ...], prefixes: Mapping[int, int] = NO_PREFIXES):
        reaches = [n + (lengths[prefixes[s]] if s in prefixes else 0) for s, n in enumerate(lengths)]
        self._rotate_at(torch.cat([torch.arange(reach - n, reach) for n, reach in zip(lengths, reaches, strict=True)]), rope)
        self._spans = CausalSpans(lengths, reaches, rope[0].device, prefixes)

    def _rotate_at(self, positions_T: Tensor, rope: tuple[Tensor, ...]) -> None:
        places_T = on_device(positions_T, rope[0].device)
        self.turns_T1D = [table_LD[places_T].unsqueeze(1) for table_LD in rope]

    def attend(
        self, layer: int, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, window: int | None = None,
        cap: float | None = None, table: int = 0, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        turns = self.turns_T1D[2 * table :][:2]
        q_TND, k_TGD = (apply_rope(x, *turns).to(v_TGD.dtype) for x in (q_TND, k_TGD))
        v_TGD = v_TGD.contiguous()  # a view would keep the queries and keys until the backward pass
        return self._attend(q_TND, k_TGD, v_TGD, scale, window, cap, sinks).flatten(1)

    def _attend(
        self, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float, window: int | None, cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return self._spans.attend(q_TND, k_TGD, v_TGD, scale, window, cap, sinks)


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, cap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """[S, N, Q, D] over [S, G, K, D], causal without a mask."""
    if cap is not None or sinks is not None:
        return composed_attention(q, k, v, scale, mask, cap, sinks, causal=mask is None)
    grouped = q.shape[1] != k.shape[1]
    # CUDA's fast kernels for masks, or float32, do not support groups.
    if grouped and q.device.type == "cuda" and (mask is not None or q.dtype == torch.float32):
        repeat = q.shape[1] // k.shape[1]
        # Not `repeat_interleave`, for which the host waits.
        k, v = (x.unsqueeze(2).expand(-1, -1, repeat, -1, -1).flatten(1, 2) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped)


def composed_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, cap: float | None, sinks: Tensor | None, *,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """Attention with logits c tanh(x / c) (Gemma 2) or sinks (GPT-OSS), which torch's kernels lack.

    Computed in blocks of queries, again in the backward pass.  Rows of q may have several heads in turn; `sinks`: one per head.
    """
    size = max(1, COMPOSED_NUMBERS // (q.shape[0] * q.shape[1] * k.shape[2]))
    num_queries, num_keys, outputs, sinks_NQ = q.shape[2], k.shape[2], [], None
    if sinks is not None:
        rows_per_head = q.shape[1] * num_queries // len(sinks)
        sinks_NQ = sinks.float().unsqueeze(1).expand(-1, rows_per_head).reshape(q.shape[1], num_queries)
    for first in range(0, num_queries, size):
        rows = slice(first, min(first + size, num_queries))
        own = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
        if causal:
            own = q.new_full((1, rows.stop - first, num_keys), -torch.inf).triu_(1 + num_keys - num_queries + first)
        call = q[:, :, rows], k, v, scale, own, cap, None if sinks_NQ is None else sinks_NQ[:, rows]
        grad = torch.is_grad_enabled() and q.requires_grad
        outputs.append(checkpoint(_composed, *call, use_reentrant=False, preserve_rng_state=False) if grad else _composed(*call))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _composed(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, cap: float | None, sinks_NQ: Tensor | None
) -> Tensor:
    groups, (sequences, heads, queries, _) = k.shape[1], q.shape
    rows = q.reshape(sequences, groups, heads // groups * queries, -1)
    logits = (rows @ k.transpose(-1, -2)).float() * (scale / (cap or 1.0))
    if cap is not None:
        logits = torch.tanh(logits) * cap
    logits = logits.view(sequences, groups, heads // groups, queries, -1)
    if mask is not None:
        logits = logits + mask.unsqueeze(-3)
    if sinks_NQ is None:
        weights = logits.softmax(-1)
    else:
        sinks = sinks_NQ.view(groups, -1, queries, 1)
        weights = (logits - torch.logaddexp(logits.logsumexp(-1, keepdim=True), sinks)).exp()
    return (weights.to(v.dtype).view(sequences, groups, -1, k.shape[2]) @ v).view_as(q)
