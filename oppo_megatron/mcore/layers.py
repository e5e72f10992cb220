"""Replacements for megatron-core's modules.

Legend: T packed tokens, H hidden, N query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable

from oppo_megatron.layout.families import AFTER, BEFORE, Traits
from oppo_megatron.layout.kernels import LayerKind
from oppo_megatron.mcore import compat
from oppo_megatron.mcore.attention import Reading
from oppo_megatron.mcore.device import triton_runs

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class NormKind:
    """`offset`: added to weights; `group`: tensor ranks whose numbers are normed together."""

    offset: float = 0.0
    group: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def sum(self, squares: Tensor) -> Tensor:
        if self.ranks > 1:
            dist.all_reduce(squares, group=self.group)
        return squares


PLAIN = NormKind()


def rms_norm(x: Tensor, weight_H: Tensor, eps: float, kind: NormKind = PLAIN) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w in float32 (Zhang and Sennrich 2019); on a CPU by `hypot`, in fewer passes."""
    if x.shape[-1] < len(weight_H):  # heads apart
        return rms_norm(x.reshape(len(x), -1), weight_H, eps, kind).view(x.shape)
    if x.device.type != "cpu" and not kind.offset and kind.ranks == 1:
        return F.rms_norm(x, (x.shape[-1],), weight_H, eps)
    return _RMSNorm.apply(x, weight_H, eps, kind)


def fixed_norm(weight_H: Tensor, eps: float, kind: NormKind = PLAIN) -> Norm:
    """Return `rms_norm`, bit-equal, with a constant weight (on a CPU copied)."""
    if weight_H.device.type != "cpu" or kind.ranks > 1:
        return lambda x: rms_norm(x, weight_H, eps, kind)
    floor, scaled_H = _constants(weight_H, eps, kind)

    def norm(x: Tensor) -> Tensor:
        if x.shape[-1] < len(weight_H):
            return norm(x.reshape(len(x), -1)).view(x.shape)
        return _normalised(x.float(), floor, scaled_H)[0].to(x.dtype)

    return norm


def _constants(weight_H: Tensor, eps: float, kind: NormKind) -> tuple[Tensor, Tensor]:
    size, wide_H = weight_H.shape[-1] * kind.ranks, weight_H.detach().float()
    wide_H = wide_H + kind.offset if kind.offset else wide_H
    return wide_H.new_full((), math.sqrt(size * eps)), wide_H * math.sqrt(size)


def _normalised(wide: Tensor, floor: Tensor, scaled_H: Tensor, kind: NormKind = PLAIN) -> tuple[Tensor, Tensor]:
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    if kind.ranks > 1:
        length = kind.sum(length.square_()).sqrt_()
    length = length.hypot_(floor)
    return (wide / length).mul_(scaled_H), length


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, kind: NormKind) -> Tensor:
        floor, scaled_H = _constants(weight_H, eps, kind)
        out, length = _normalised(x.float(), floor, scaled_H, kind)
        ctx.save_for_backward(x, length, scaled_H)
        ctx.weight_dtype, ctx.kind = weight_H.dtype, kind
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, length, scaled_H = ctx.saved_tensors
        unit, wide = x.float() / length, grad.float()
        product_RH = (unit * wide).flatten(0, -2)
        weight_grad_H = None
        if ctx.needs_input_grad[1]:
            roots_R = product_RH.new_full((len(product_RH),), math.sqrt(len(scaled_H) * ctx.kind.ranks))
            weight_grad_H = (product_RH.t() @ roots_R).to(ctx.weight_dtype)
        # a row's output is scaled * unit, and d unit / d x = (1 - unit unit^T) / length
        along = ctx.kind.sum(product_RH @ scaled_H).neg_().view_as(length)
        return (wide * scaled_H).addcmul_(unit, along).div_(length).to(x.dtype), weight_grad_H, None, None


_TANH: dict[str, Any] = {"approximate": "tanh"}
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    "silu": (F.silu, torch.ops.aten.silu_backward.grad_input),
    "gelu_pytorch_tanh": (partial(F.gelu, **_TANH), partial(torch.ops.aten.gelu_backward.grad_input, **_TANH)),
}
"""By its name in transformers: an activation, and its gradient, from the output's gradient and the input."""


def gated(gate_up: Tensor, activation: str, clamp: tuple[float, float] | None = None) -> Tensor:
    """Gated activation (Shazeer 2020), activation(gate) * up: [T, ..., 2 F] -> [T, ..., F].

    `clamp`: limit l and gain a of silu(a min(gate, l)) / a * (1 + max(-l, min(up, l))) (GPT-OSS).
    """
    return _Gated.apply(gate_up, activation, clamp)


@cache
def gate_kernels(device: torch.device) -> ModuleType | None:
    if device.type != "cuda":
        return None
    kernels, two = partial(import_module, "oppo_megatron.mcore.gate_kernel"), torch.zeros(1, 2, device=device)
    lost = "gated activations take several kernels"
    return kernels() if triton_runs(lambda: kernels().triton_gate_grad(two, two[:, :1], "silu"), lost) else None


def activated(gate_up: Tensor, activation: str, clamp: tuple[float, float] | None = None) -> Tensor:
    """Return `gated` without a gradient."""
    if (kernels := gate_kernels(gate_up.device)) is not None:
        return kernels.triton_gate(gate_up, activation, clamp)
    gate, up = _halves(gate_up, clamp)
    return ACTIVATIONS[activation][0](gate).mul_(up)


class _Gated(torch.autograd.Function):
    """Recomputes the activation backward; megatron-core keeps two more tensors."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str, clamp: tuple[float, float] | None) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.clamp = activation, clamp
        return activated(gate_up, activation, clamp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        if (kernels := gate_kernels(gate_up.device)) is not None:
            return kernels.triton_gate_grad(gate_up, grad, ctx.activation, ctx.clamp), None, None
        activation, gradient = ACTIVATIONS[ctx.activation]
        grads = torch.empty_like(gate_up)
        (gate, up), (gate_grad, up_grad) = _halves(gate_up, ctx.clamp), grads.chunk(2, dim=-1)
        torch.mul(grad, activation(gate), out=up_grad)
        torch.mul(grad, up, out=gate_grad)
        gradient(gate_grad, gate, grad_input=gate_grad)
        if ctx.clamp is not None:
            (limit, gain), (gate, up) = ctx.clamp, gate_up.chunk(2, dim=-1)
            gate_grad.mul_(gain).masked_fill_(gate > limit, 0.0)
            up_grad.div_(gain).masked_fill_(up.abs() > limit, 0.0)
        return grads, None, None


def _halves(gate_up: Tensor, clamp: tuple[float, float] | None) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, dim=-1)
    if clamp is None:
        return gate, up
    limit, gain = clamp
    return gate.clamp(max=limit).mul_(gain), up.clamp(-limit, limit).add_(1.0).div_(gain)


def tag_parameter(
    parameter: torch.Tensor, name: Literal["sequence_parallel", "partition_stride", "allreduce"], value: bool | int
) -> None:
    setattr(parameter, name, value)


class Gated(IdentityOp):
    """`gated` as a module, which megatron-core asks for since 0.17."""

    activation = "silu"  # set by the model

    def forward(self, gate_up: Tensor) -> Tensor:
        return gated(gate_up, self.activation)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


class RMSNorm(torch.nn.Module):
    kind = PLAIN

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        tag_parameter(self.weight, "sequence_parallel", config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.kind)


class ZeroCentredNorm(RMSNorm):
    kind = NormKind(offset=1.0)


class OfHeads(torch.nn.Module):
    """A parameter that tensor ranks divide by heads."""

    group: dist.ProcessGroup

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        assert metadata is not None
        own = self.state_dict(prefix="", keep_vars=True)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets, tp_group=self.group, dp_cp_group=metadata["dp_cp_group"]
        )
        return sharded


class Sinks(OfHeads):
    """Learned logits, one per query head, that join the softmax without a value; megatron-core's name in checkpoints."""

    def __init__(self, config: TransformerConfig, pg_collection: Any, **_: Any):
        super().__init__()
        self.group = pg_collection.tp
        size = config.num_attention_heads // self.group.size()
        self.softmax_offset = torch.nn.Parameter(torch.zeros(size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)


class WidthNorm(OfHeads, RMSNorm):
    """Norm of a token's queries or keys over all heads [T, ..., D], including other tensor ranks' (OLMo 2)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, group: dist.ProcessGroup):
        super().__init__(config, hidden_size, eps)
        self.group, self.kind = group, NormKind(group=group)
        tag_parameter(self.weight, "sequence_parallel", False)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)


class PlannedSelfAttention(SelfAttention):
    stage_layer = 0  # set by the model: index of this layer on its pipeline stage
    plain_reading = Reading(1.0)  # set by the model

    @property
    def reading(self) -> Reading:
        """Parameters of a module may be replaced, so sinks are looked up."""
        return self.plain_reading._replace(sinks=getattr(self.core_attention, "softmax_offset", None))

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: Any, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.get_query_key_value_tensors(hidden_states)

        def attend(q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
            return packed_seq_params.attend(self.stage_layer, q_TND, k_TGD, v_TGD, *self.reading)

        if self.checkpoint_core_attention and self.training:
            if self.num_query_groups_per_partition > 1:  # queries are a copy: as views, keys and values would keep them twice
                k, v = k.contiguous(), v.contiguous()
            out = checkpoint(attend, False, q[:, 0], k[:, 0], v[:, 0])
        else:
            out = attend(q[:, 0], k[:, 0], v[:, 0])
        return self.linear_proj(out.unsqueeze(1))


class ScalarHead(torch.nn.Module):
    sequence_parallel = False

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        return F.linear(hidden.float(), self.weight.float()), None


class NormedSum(torch.nn.Module):
    """megatron-core's `bias_dropout_add` after a norm."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.norm = norm

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return lambda out_and_bias, residual, dropout: residual + self.norm(out_and_bias[0])


class OwnLayer(TransformerLayer):
    """A layer with norms before its residual sums, or over the width of queries and of keys, which megatron-core's lacks."""

    def __init__(self, config: TransformerConfig, *args: Any, row: Traits, pg_collection: Any, **kwargs: Any):
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.bias_dropout_add_exec_handler = nullcontext  # megatron-core's turns gradients on, also in inference mode
        attention, eps = self.self_attention, config.layernorm_epsilon
        if row.norms.keys() >= AFTER.keys():
            norm = norm_of(row)
            self.self_attn_bda, self.mlp_bda = (NormedSum(norm(config, config.hidden_size, eps)) for _ in AFTER)
        if row.qk_norm == "width":
            dim = attention.hidden_size_per_attention_head
            queries, keys = attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition
            attention.q_layernorm = WidthNorm(config, queries * dim, eps, pg_collection.tp)
            attention.k_layernorm = WidthNorm(config, keys * dim, eps, pg_collection.tp)


def norm_of(row: Traits) -> type[RMSNorm]:
    return ZeroCentredNorm if row.norm_offset else RMSNorm


def block_spec(config: TransformerConfig, row: Traits, num_layers: int, kind: LayerKind = "torch") -> TransformerBlockSubmodules:
    """Return a stage's modules; norms are not fused, so that parameters keep their names."""
    linears: tuple[Any, ...] = (BiasedLinear, ColumnParallelLinear, RowParallelLinear)
    norm: Any = norm_of(row)
    if kind == "transformer_engine":
        from megatron.core.extensions import transformer_engine as te

        linears = te.TEColumnParallelLinear, te.TEColumnParallelLinear, te.TERowParallelLinear
        norm = norm if row.norm_offset else te.TENorm
    qkv, column, row_parallel = linears
    layer: ModuleSpec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    parts = layer.submodules
    for place in BEFORE:
        setattr(parts, place, norm if place in row.norms else IdentityOp)
    if row.norms != BEFORE or row.qk_norm == "width":
        layer.module, layer.params = OwnLayer, {"row": row}
    parts.self_attention.module = PlannedSelfAttention
    parts.self_attention.submodules.core_attention = Sinks if row.sinks else IdentityOp
    parts.self_attention.submodules.linear_qkv = qkv
    parts.self_attention.submodules.linear_proj = row_parallel
    mlp = compat.parts_of(parts.mlp)
    mlp.linear_fc1, mlp.linear_fc2, mlp.activation_func = column, row_parallel, Gated
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = norm
        parts.self_attention.submodules.k_layernorm = norm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


class BiasedLinear(ColumnParallelLinear):
    """Rounds once, as in decoding; megatron-core rounds before the bias."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias, group = kwargs["bias"], kwargs["tp_group"]
        if bias is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        if kwargs["sequence_parallel"]:
            if weight.requires_grad:
                return _GatheredProduct.apply(input, weight, bias, group)
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=group)
        elif kwargs["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=group)
        return F.linear(input, weight, bias)


class _GatheredProduct(torch.autograd.Function):
    """Keeps a tensor rank's part of the input [T, 1, H] and gathers it again backward, as megatron-core's product does."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, bias: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.group = group
        return F.linear(gather_from_sequence_parallel_region(part, group=group, use_global_buffer=True), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        part, weight = ctx.saved_tensors
        part_grad = reduce_scatter_to_sequence_parallel_region(grad @ weight, group=ctx.group)
        whole = gather_from_sequence_parallel_region(part, group=ctx.group, use_global_buffer=True)
        grad_TO = grad.flatten(0, 1)
        return part_grad, grad_TO.t() @ whole.flatten(0, 1), grad_TO.sum(0), None
