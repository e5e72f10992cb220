"""Replacements for megatron-core's modules.

Legend: T packed tokens, H hidden, N query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import checkpoint, copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from oppo_megatron.layout.kernels import LayerKind
from oppo_megatron.mcore import compat

Norm = Callable[[Tensor], Tensor]


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w in float32 (Zhang and Sennrich 2019); on a CPU by `hypot`, in fewer passes."""
    if x.device.type != "cpu":
        return F.rms_norm(x, (x.shape[-1],), weight_H, eps)
    return _OnCpu.apply(x, weight_H, eps)


def fixed_norm(weight_H: Tensor, eps: float) -> Norm:
    """Return `rms_norm`, bit-equal, with a constant weight (on a CPU copied)."""
    if weight_H.device.type != "cpu":
        return lambda x: F.rms_norm(x, (weight_H.shape[-1],), weight_H, eps)
    floor, scaled_H = _constants(weight_H, eps)
    return lambda x: _normalised(x.float(), floor, scaled_H)[0].to(x.dtype)


def _constants(weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size, wide_H = weight_H.shape[-1], weight_H.detach().float()
    return wide_H.new_full((), math.sqrt(size * eps)), wide_H * math.sqrt(size)


def _normalised(wide: Tensor, floor: Tensor, scaled_H: Tensor) -> tuple[Tensor, Tensor]:
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(floor)
    return (wide / length).mul_(scaled_H), length


class _OnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        floor, scaled_H = _constants(weight_H, eps)
        out, length = _normalised(x.float(), floor, scaled_H)
        ctx.save_for_backward(x, length, scaled_H)
        ctx.weight_dtype = weight_H.dtype
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, length, scaled_H = ctx.saved_tensors
        unit, wide = x.float() / length, grad.float()
        product_RH = (unit * wide).flatten(0, -2)
        weight_grad_H = None
        if ctx.needs_input_grad[1]:
            roots_R = product_RH.new_full((len(product_RH),), math.sqrt(len(scaled_H)))
            weight_grad_H = (product_RH.t() @ roots_R).to(ctx.weight_dtype)
        # a row's output is scaled * unit, and d unit / d x = (1 - unit unit^T) / length
        along = (product_RH @ scaled_H).neg_().view_as(length)
        return (wide * scaled_H).addcmul_(unit, along).div_(length).to(x.dtype), weight_grad_H, None


def swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020), silu(gate) * up: [T, ..., 2 F] -> [T, ..., F]."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    """Recomputes silu backward; megatron-core keeps two more tensors."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grads = torch.empty_like(gate_up)
        (gate, up), (gate_grad, up_grad) = gate_up.chunk(2, dim=-1), grads.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=up_grad)
        torch.mul(grad, up, out=gate_grad)
        torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate_grad)
        return grads


def tag_parameter(parameter: torch.Tensor, name: Literal["sequence_parallel", "partition_stride"], value: bool | int) -> None:
    setattr(parameter, name, value)


class SwiGLU(IdentityOp):
    """`swiglu` as a module, which megatron-core asks for since 0.17."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


class RMSNorm(torch.nn.Module):
    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        tag_parameter(self.weight, "sequence_parallel", config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class PlannedSelfAttention(SelfAttention):
    stage_layer = 0  # set by the model: index of this layer on its pipeline stage
    window: int | None = None  # set by the model if its sequences may be longer

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: Any, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.get_query_key_value_tensors(hidden_states)
        scale = self.hidden_size_per_attention_head**-0.5

        def attend(q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
            return packed_seq_params.attend(self.stage_layer, q_TND, k_TGD, v_TGD, scale, self.window)

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


def block_spec(config: TransformerConfig, num_layers: int, kind: LayerKind = "torch") -> TransformerBlockSubmodules:
    """Return a stage's modules; norms are not fused, so that parameters keep their names."""
    modules: tuple[Any, ...] = (BiasedLinear, ColumnParallelLinear, RowParallelLinear, RMSNorm)
    if kind == "transformer_engine":
        from megatron.core.extensions import transformer_engine as te

        modules = (te.TEColumnParallelLinear, te.TEColumnParallelLinear, te.TERowParallelLinear, te.TENorm)
    qkv, column, row, norm = modules
    layer: ModuleSpec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    parts = layer.submodules
    parts.input_layernorm = norm
    parts.pre_mlp_layernorm = norm
    parts.self_attention.module = PlannedSelfAttention
    parts.self_attention.submodules.core_attention = IdentityOp
    parts.self_attention.submodules.linear_qkv = qkv
    parts.self_attention.submodules.linear_proj = row
    mlp = compat.parts_of(parts.mlp)
    mlp.linear_fc1, mlp.linear_fc2, mlp.activation_func = column, row, SwiGLU
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
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=group)
        elif kwargs["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=group)
        return F.linear(input, weight, bias)
