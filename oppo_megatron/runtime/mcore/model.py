"""A role's model: one pipeline stage of a megatron-core `GPTModel`, driven by an attention plan.

Legend: T packed tokens, H hidden, V vocabulary, R rows of interest.
"""

from __future__ import annotations

from typing import Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from oppo_megatron.errors import CapacityError
from oppo_megatron.runtime.mcore import compat
from oppo_megatron.runtime.mcore.attention import AttentionPlan
from oppo_megatron.runtime.mcore.groups import RoleGroups
from oppo_megatron.runtime.mcore.kv_cache import KVCache
from oppo_megatron.runtime.mcore.layers import LeanLayer, ScalarHead, block_spec
from oppo_megatron.runtime.mcore.rope import rope_tables
from oppo_megatron.runtime.shape import ModelShape

Head = Literal["lm", "scalar"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RoleModel(GPTModel):
    """The stage that this rank holds.  `head` is "lm" (vocabulary-parallel logits) or "scalar" (a number a token)."""

    def __init__(self, shape: ModelShape, groups: RoleGroups, config: TransformerConfig, head: Head, max_length: int):
        last = groups.is_last_stage
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config, shape.num_layers // groups.pp),
            vocab_size=shape.vocab_size,
            max_sequence_length=max_length,
            pre_process=groups.is_first_stage,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied_embeddings and head == "lm",
            position_embedding_type="none",  # the attention plan rotates queries and keys
            pg_collection=groups.collection,
        )
        if head == "scalar" and last:
            self.output_layer = ScalarHead(config)
        for index, layer in enumerate(self.decoder.layers):
            layer.self_attention.stage_layer = index
        self.shape, self.groups, self.head = shape, groups, head
        self.max_length = max_length

    def set_rope(self, device: torch.device) -> None:
        """Make the rotary tables on the device that the parameters are on."""
        self.rope = rope_tables(self.shape, self.max_length, device)

    def forward(self, tokens_T: Tensor | None, plan: AttentionPlan, rows_R: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Hidden states [T, 1, H] before the last stage; on it logits [R, V / tp] or scalars [R] of the rows (null: all T).

        Stages after the first take their input from `set_input_tensor`.
        """
        hidden = self.embedding(tokens_T.unsqueeze(0), None) if self.pre_process and tokens_T is not None else None
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=plan)
        if not self.post_process:
            return hidden
        if rows_R is not None:
            hidden = hidden[rows_R]
        tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        out, _ = self.output_layer(hidden, weight=tied)
        return out[:, 0, 0] if self.head == "scalar" else out[:, 0].float()

    def new_cache(self, num_slots: int, budget_bytes: int | None = None) -> KVCache:
        """A KV cache for this stage's layers.  Raises CapacityError if the budget holds no sequence."""
        weight = next(self.parameters())
        return KVCache(
            num_layers=len(self.decoder.layers),
            num_kv_heads=self.shape.num_kv_heads // self.groups.tp,
            head_dim=self.shape.head_dim,
            num_slots=num_slots,
            max_length=self.max_length,
            rope=self.rope,
            dtype=weight.dtype,
            device=weight.device,
            budget_bytes=budget_bytes,
        )


def transformer_config(shape: ModelShape, groups: RoleGroups, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's configuration of the shape.  Fusions that need apex or CUDA-only kernels are off."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=groups.tp,
        pipeline_model_parallel_size=groups.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,  # every weight comes from a checkpoint or a seeded source
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        variable_seq_lengths=True,  # packed micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # megatron asks for it beside variable lengths
    )


def build_model(
    shape: ModelShape,
    groups: RoleGroups,
    *,
    head: Head,
    max_length: int,
    dtype: str,
    device: torch.device,
    lean: bool = True,
) -> RoleModel:
    """This rank's stage, weights not yet set.  Raises CapacityError if the model has fewer positions than `max_length`."""
    if max_length > shape.max_positions:
        raise CapacityError(
            f"sequences of {max_length} tokens exceed the model's {shape.max_positions} positions; lower "
            "data.max_prompt_tokens or rollout.max_response_tokens."
        )
    compat.install()
    config = transformer_config(shape, groups, DTYPES[dtype])
    model = RoleModel(shape, groups, config, head, max_length).to(device)
    for layer in model.decoder.layers:
        assert isinstance(layer, LeanLayer)
        layer.lean = lean
    _mark_shards(model)
    model.set_rope(device)
    return model


def _mark_shards(model: RoleModel) -> None:
    """Say which parameters are tensor-parallel shards, so that gradient norms count each weight once.

    megatron marks weights while it initialises them, which this runtime does not let it do.
    """
    for name, module in model.named_modules():
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)) and module.weight is not None:
            stride = 2 if name.endswith("linear_fc1") else 1  # gate and up are sharded separately
            set_tensor_model_parallel_attributes(module.weight, True, 0, stride)
        elif isinstance(module, RowParallelLinear):
            set_tensor_model_parallel_attributes(module.weight, True, 1, 1)
