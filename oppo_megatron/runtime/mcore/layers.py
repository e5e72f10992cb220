"""The modules that our layer spec puts in place of megatron-core's own, and nothing else.

Legend: T packed tokens, H hidden, N query heads, G key/value heads of this tensor rank, R = N / G, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from oppo_megatron.runtime.mcore.kv_cache import CachedPlan
from oppo_megatron.runtime.mcore.rope import apply_rope


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019) with the constructor that megatron's specs call."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # megatron sums the gradient of parameters marked so over tensor ranks.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class PlannedSelfAttention(SelfAttention):
    """Self attention whose middle part, between the projections, belongs to the call's `AttentionPlan`."""

    stage_layer = 0  # set by the model: index of this layer on its pipeline stage

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: Any, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.get_query_key_value_tensors(hidden_states)
        scale = self.hidden_size_per_attention_head**-0.5

        def attend(q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
            return packed_seq_params.attend(self.stage_layer, q_TND, k_TGD, v_TGD, scale)

        if self.checkpoint_core_attention and self.training:
            out = checkpoint(attend, False, q[:, 0], k[:, 0], v[:, 0])
        else:
            out = attend(q[:, 0], k[:, 0], v[:, 0])
        return self.linear_proj(out.unsqueeze(1))


class LeanLayer(TransformerLayer):
    """A layer that, continuing from a cache, computes over its own parameters in few calls.

    The module path makes some fifteen nested module calls a layer, which dominate a decode step of few tokens.  Training and
    full forwards take megatron's path; `lean = False` makes cached calls take it too (the oracle of the parity tests).
    """

    lean = True

    def forward(self, hidden_states: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        if not (self.lean and isinstance(packed_seq_params, CachedPlan)) or torch.is_grad_enabled():
            return super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)
        x_TH = hidden_states[:, 0]
        x_TH = x_TH + self._reduce(self._attention(self.input_layernorm(x_TH), packed_seq_params))
        x_TH = x_TH + self._reduce(self._mlp(self.pre_mlp_layernorm(x_TH)))
        return x_TH.unsqueeze(1), None

    def _attention(self, x_TH: Tensor, plan: CachedPlan) -> Tensor:
        attention = self.self_attention
        groups = attention.num_query_groups_per_partition
        dim = attention.hidden_size_per_attention_head
        qkv = F.linear(x_TH, attention.linear_qkv.weight, attention.linear_qkv.bias)
        qkv_TGXD = qkv.view(x_TH.shape[0], groups, -1, dim)  # X = R query heads, then the key, then the value
        cos, sin = plan.cos_T1D, plan.sin_T1D
        if self.config.qk_layernorm:
            q = apply_rope(attention.q_layernorm(qkv_TGXD[:, :, :-2]), cos.unsqueeze(1), sin.unsqueeze(1))
            k = apply_rope(attention.k_layernorm(qkv_TGXD[:, :, -2]), cos, sin)
        else:
            qk_TGXD = apply_rope(qkv_TGXD[:, :, :-1], cos.unsqueeze(1), sin.unsqueeze(1))
            q, k = qk_TGXD[:, :, :-1], qk_TGXD[:, :, -1]
        q_TND = q.reshape(x_TH.shape[0], -1, dim)
        out = plan.attend_rotated(attention.stage_layer, q_TND, k, qkv_TGXD[:, :, -1], dim**-0.5)
        return F.linear(out, attention.linear_proj.weight)

    def _mlp(self, x_TH: Tensor) -> Tensor:
        gate, up = F.linear(x_TH, self.mlp.linear_fc1.weight).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.mlp.linear_fc2.weight)

    def _reduce(self, x: Tensor) -> Tensor:
        if self.tp_group.size() > 1:
            dist.all_reduce(x, group=self.tp_group)
        return x


class ScalarHead(torch.nn.Module):
    """One number a token, in the place and with the calling convention of `GPTModel.output_layer`; replicated over TP."""

    sequence_parallel = False

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        return F.linear(hidden.float(), self.weight.float()), None


def block_spec(config: TransformerConfig, num_layers: int) -> TransformerBlockSubmodules:
    """Spec of one pipeline stage of `num_layers` layers, final norm included."""
    layer: ModuleSpec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.module = LeanLayer
    parts = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.module = PlannedSelfAttention
    parts.self_attention.submodules.core_attention = IdentityOp
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = RMSNorm
        parts.self_attention.submodules.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
