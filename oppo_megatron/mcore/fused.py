"""Cached calls of a stage without megatron's nested calls per layer, which dominate small steps.

Legend: T packed tokens, H hidden, G key/value heads, X query heads per key head + 2, D head dimension.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.mcore.cpu import product
from oppo_megatron.mcore.experts import ExpertMLP
from oppo_megatron.mcore.kv.cached_plan import CachedPlan
from oppo_megatron.mcore.layers import PLAIN, Norm, activated, fixed_norm
from oppo_megatron.mcore.lora import Adapters, adapters_of

Product = Callable[[Tensor], Tensor]


class FusedStage:
    """A stage's layers and, on the last, final norm; copies weights only if `packed`."""

    def __init__(self, layers: Sequence[Any], final_norm: Any | None, tp_group: dist.ProcessGroup, *, packed: bool):
        self._bare = [_FusedLayer(layer, packed) for layer in layers]
        self.layers = [bare.adapted(layer) for bare, layer in zip(self._bare, layers, strict=True)]
        self.final_norm = None if final_norm is None else _norm(final_norm)
        self.tp_group = tp_group if tp_group.size() > 1 else None

    def of(self, layers: Sequence[Any], tp_group: dist.ProcessGroup) -> FusedStage:
        stage = copy.copy(self)
        stage.layers = [bare.adapted(layer) for bare, layer in zip(self._bare, layers, strict=True)]
        stage.tp_group = tp_group if tp_group.size() > 1 else None
        return stage

    def __call__(self, x_TH: Tensor, plan: CachedPlan) -> Tensor:
        for number, layer in enumerate(self.layers):
            x_TH = x_TH + layer.after_attention(self._reduced(layer.attend(x_TH, plan, number)))
            x_TH = x_TH + layer.after_mlp(self._reduced(layer.transform(x_TH, plan)))
        return x_TH if self.final_norm is None else self.final_norm(x_TH)

    def _reduced(self, x_TH: Tensor) -> Tensor:
        if self.tp_group is not None:
            dist.all_reduce(x_TH, group=self.tp_group)
        return x_TH


class _FusedLayer:
    def __init__(self, layer: Any, packed: bool):
        attention, mlp = layer.self_attention, layer.mlp
        self.norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.pre_mlp_layernorm)
        self.after_attention, self.after_mlp = (_norm(getattr(s, "norm", None)) for s in (layer.self_attn_bda, layer.mlp_bda))
        self.qkv = product(attention.linear_qkv.weight, _bias(attention.linear_qkv), packed=packed)
        self.head_norms: tuple[Norm, Norm] | None = None  # of queries and keys
        if hasattr(attention.q_layernorm, "weight"):
            self.head_norms = _norm(attention.q_layernorm), _norm(attention.k_layernorm)
        if (bias_H := _bias(attention.linear_proj)) is not None:  # after the sum over ranks
            self.after_attention = lambda x_TH: x_TH + bias_H
        self.proj = product(attention.linear_proj.weight, packed=packed)
        self.experts = mlp if isinstance(mlp, ExpertMLP) else None
        if self.experts is None:
            self.gate_up = product(mlp.linear_fc1.weight, packed=packed)
            self.down = product(mlp.linear_fc2.weight, packed=packed)
            self.activation = mlp.activation_func.activation
        groups, dim = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        self.shape_GXD = groups, attention.num_attention_heads_per_partition // groups + 2, dim
        self.reading = attention.reading

    def adapted(self, layer: Any) -> _FusedLayer:
        attention, mlp, new = layer.self_attention, layer.mlp, copy.copy(self)
        new.qkv = _with(self.qkv, adapters_of(attention, "linear_qkv"))
        new.proj = _with(self.proj, adapters_of(attention, "linear_proj"))
        if self.experts is None:
            new.gate_up = _with(self.gate_up, adapters_of(mlp, "linear_fc1"))
            new.down = _with(self.down, adapters_of(mlp, "linear_fc2"))
        return new

    def attend(self, x_TH: Tensor, plan: CachedPlan, number: int) -> Tensor:
        qkv_TGXD = self.qkv(self.norm(x_TH)).view(-1, *self.shape_GXD)
        if self.head_norms is not None:
            queries, keys = self.head_norms
            qkv_TGXD = torch.cat(  # unnamed parts: a name would keep them, and the product, alive during attention
                [queries(qkv_TGXD[:, :, :-2]), keys(qkv_TGXD[:, :, -2:-1]), qkv_TGXD[:, :, -1:]], dim=2
            )
        return self.proj(plan.attend_grouped(number, qkv_TGXD, self.reading))

    def transform(self, x_TH: Tensor, plan: CachedPlan) -> Tensor:
        if self.experts is not None:
            return self.experts.part(self.mlp_norm(x_TH), plan)
        gate_up = self.gate_up(self.mlp_norm(x_TH))  # the normed states are freed at once
        return self.down(activated(gate_up, self.activation))


def _bias(linear: Any) -> Tensor | None:
    """Transformer-engine's layers without a bias have an empty tensor."""
    return linear.bias if linear.bias is not None and linear.bias.numel() else None


def _norm(norm: Any) -> Norm:
    """`rms_norm` by a norm's weights; what is not a norm changes nothing."""
    if not hasattr(norm, "weight"):
        return lambda x: x
    return fixed_norm(norm.weight, norm.eps, *([norm.kind] if getattr(norm, "kind", PLAIN) != PLAIN else []))


def _with(bare: Product, adapters: Adapters | None) -> Product:
    return bare if adapters is None else lambda x_TI: bare(x_TI) + adapters.cached(x_TI)
