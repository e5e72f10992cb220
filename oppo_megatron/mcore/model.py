"""A pipeline stage of a megatron-core `GPTModel` with an attention plan.

Legend: T packed tokens, H hidden, V vocabulary, R rows of interest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor

from oppo_megatron.config.model import KVLayout, LoraConfig, TrainingLayoutConfig
from oppo_megatron.errors import CapacityError
from oppo_megatron.layout.hf_layout import Head, Part, adapter_parts, stage_parts
from oppo_megatron.layout.kernels import LayerKind
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore import compat
from oppo_megatron.mcore.attention import AttentionPlan, Reading, binding, rope_tables
from oppo_megatron.mcore.context import SequenceShare
from oppo_megatron.mcore.cpu import can_prepack, product, row_multiple
from oppo_megatron.mcore.experts import Routing, with_experts
from oppo_megatron.mcore.fused import FusedStage
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.mcore.kv.cached_plan import CachedPlan
from oppo_megatron.mcore.kv.paged import PagedKVCache, find_kernel
from oppo_megatron.mcore.kv.sequence_cache import KVCache, SequenceCache
from oppo_megatron.mcore.layers import ScalarHead, block_spec
from oppo_megatron.mcore.vocab import OutputRows, VocabShards

DecodePath = Literal["packed", "fused", "module"]
"""Cached calls use a copy of the weights for CPUs (others: as fused), few kernels on the parameters, or megatron's modules."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RoleModel(GPTModel):
    """Stage `stage` of `num_stages` (chunk c of pipeline rank p: c * pp + p); `head`: "lm" (vocabulary-parallel) or "scalar"."""

    def __init__(
        self, shape: ModelShape, groups: RoleGroups, config: TransformerConfig, head: Head, max_length: int, chunk: int = 0,
        layers: LayerKind = "torch",
    ):  # fmt: skip
        num_chunks = config.virtual_pipeline_model_parallel_size
        num_stages, stage = groups.pp * (num_chunks or 1), chunk * groups.pp + groups.pp_rank
        first, last = stage == 0, stage == num_stages - 1
        block = block_spec(config, shape.traits, shape.num_layers // num_stages, layers)
        super().__init__(
            config=config,
            transformer_layer_spec=block if shape.experts is None else with_experts(block, shape.experts),
            vocab_size=shape.vocab_rows(groups.tp) * groups.tp,
            max_sequence_length=max_length,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied_embeddings and head == "lm",
            position_embedding_type="none",  # the attention plan rotates queries and keys
            pg_collection=groups.collection,
            vp_stage=None if num_chunks is None else chunk,
        )
        self.shape, self.groups, self.head = shape, groups, head
        self.vocab = VocabShards(groups.collection.tp, shape.vocab_rows(groups.tp), shape.vocab_size, shape.final_cap)
        self.stage, self.num_stages = stage, num_stages
        self.max_length = max_length
        self.adapters: LoraConfig | None = None  # set when adapters are given
        self._path: DecodePath = "module"
        self.fused: FusedStage | None = None  # tensors derived from the weights, for cached calls
        self._fused_head: Callable[[Tensor], Tensor] | None = None
        if head == "scalar" and last:
            self.output_layer = ScalarHead(self.config)
        for index, layer in enumerate(self.decoder.layers):
            layer.self_attention.stage_layer = index
            number = layer.layer_number - 1
            window, table = binding(shape.windows[number], max_length), shape.tables[number]
            layer.self_attention.plain_reading = Reading(shape.attention_scale, window, shape.attention_cap, table)
            if shape.experts is None:
                layer.mlp.activation_func.activation = shape.traits.activation[1]

    def parts(self, tp: int, stage: int, num_stages: int, ep: int = 1) -> list[Part]:
        """Return a stage's trained tensors in any layout."""
        sizes = {"tp_size": tp, "pp_rank": stage, "pp_size": num_stages}
        if self.adapters is not None:
            return adapter_parts(self.shape, self.adapters, self.head, **sizes)
        return stage_parts(self.shape, self.head, ep_size=ep, **sizes)

    @property
    def token_multiple(self) -> int:
        return math.lcm(self.groups.tp if self.config.sequence_parallel else 1, row_multiple(next(self.parameters())))

    @property
    def output_weight(self) -> Tensor:
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def decode_by(self, path: DecodePath) -> None:
        self._path = path
        self.fused = self._fused_head = None
        self.end_weight_update()

    def begin_weight_update(self) -> None:
        """Free tensors derived from weights (kept with adapters)."""
        if self.adapters is None:
            self.fused = self._fused_head = None

    def end_weight_update(self) -> None:
        if self._path == "module":
            self.fused = None
            return
        if self.adapters is not None and self.fused is not None:
            return
        packed = self._path == "packed" and all(can_prepack(p) for p in self.parameters())
        self.fused = FusedStage(self.decoder.layers, self.decoder.final_layernorm, self.groups.collection.tp, packed=packed)
        if self.post_process and self.head == "lm":
            self._fused_head = product(self.output_weight, packed=packed)

    def compute_as(self, adapted: RoleModel) -> None:
        """Use the derived tensors of `adapted`."""
        self._path, self._fused_head = adapted._path, adapted._fused_head
        if adapted.fused is not None:
            self.fused = adapted.fused.of(self.decoder.layers, self.groups.collection.tp)

    def set_rope(self, device: torch.device) -> None:
        self.rope = rope_tables(self.shape, self.max_length, device)

    def forward(self, tokens_T: Tensor | None, plan: AttentionPlan, rows_R: Tensor | None = None) -> Tensor:
        """Return hidden [T, 1, H]; last stage: normed hidden [R, H] for `output_rows` or `logits`, or scalars [R]."""
        if self.fused is not None and isinstance(plan, CachedPlan):
            return self._cached_forward(self.fused, tokens_T, plan, rows_R)
        hidden = None
        if self.pre_process and tokens_T is not None:
            hidden = self._scaled(self.embedding(tokens_T.unsqueeze(0), None))
        if hidden is not None and self.adapters is not None and torch.is_grad_enabled():
            hidden.requires_grad_()  # of frozen embeddings; without, layers that are computed again would have no gradient
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=plan)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:  # a vocabulary shard gives a part of the gradient, the scalar head all of it
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=self.head == "lm", group=self.groups.collection.tp
            )
        hidden_RH = hidden[:, 0] if rows_R is None else hidden[rows_R, 0]
        if self.head == "scalar":
            return self.output_layer(hidden_RH)[0][:, 0]
        if self.config.sequence_parallel:
            return hidden_RH
        return copy_to_tensor_model_parallel_region(hidden_RH, group=self.groups.collection.tp)

    def output_rows(self, hidden_RH: Tensor, share: SequenceShare | None = None) -> OutputRows:
        return OutputRows(hidden_RH, self.output_weight, self.vocab, share)

    @torch.no_grad()
    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return float32 logits [R, V / tp] (last rank: maybe fewer) of few rows."""
        multiply = self._fused_head or product(self.output_weight, packed=False)
        return self.vocab.capped(self.vocab.of_tokens(multiply(hidden_RH))).float()

    def _scaled(self, embedded: Tensor) -> Tensor:
        if not self.shape.traits.scaled_embedding:
            return embedded
        return embedded * float(torch.tensor(self.shape.hidden_size**0.5).to(embedded.dtype))  # rounded, as in transformers

    def _cached_forward(self, stage: FusedStage, tokens_T: Tensor | None, plan: CachedPlan, rows_R: Tensor | None) -> Tensor:
        if self.pre_process and tokens_T is not None:
            words = self.embedding.word_embeddings
            hidden_TH = self._scaled(words(tokens_T) if self.groups.tp > 1 else F.embedding(tokens_T, words.weight))
        else:
            hidden_TH = self.decoder.input_tensor[:, 0]
        hidden_TH = stage(hidden_TH, plan)
        if not self.post_process:
            return hidden_TH.unsqueeze(1)
        if rows_R is not None:
            hidden_TH = hidden_TH[rows_R]
        if self.head == "scalar":
            return self.output_layer(hidden_TH)[0][:, 0]
        return hidden_TH

    def tie_embeddings_and_output_weights_state_dict(
        self, sharded_state_dict: dict[str, Any], output_layer_weight_key: str, first_stage_word_emb_key: str,
        metadata: dict[str, Any],
    ) -> None:  # fmt: skip
        """Save the output layer as a copy of the embedding."""
        if not self.post_process or self.pre_process:
            return
        replicas = metadata["dp_cp_group"]
        sharded_state_dict[output_layer_weight_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.shared_embedding_or_output_weight(), key=first_stage_word_emb_key,
            replica_id=(1, 0, replicas.rank()), allow_shape_mismatch=True, tp_group=self.groups.collection.tp,
            dp_cp_group=replicas,
        )  # fmt: skip

    def new_cache(self, num_slots: int, budget_bytes: int | None = None, layout: KVLayout = "dense") -> KVCache | PagedKVCache:
        weight = next(self.parameters())
        kernel = find_kernel(weight.device, weight.dtype)
        is_paged = layout == "paged" or (layout == "auto" and kernel is not None)
        make = functools.partial(PagedKVCache, kernel=kernel) if is_paged else KVCache
        return make(
            num_layers=len(self.decoder.layers), num_kv_heads=self.shape.num_kv_heads // self.groups.tp,
            head_dim=self.shape.head_dim, num_slots=num_slots, max_length=self.max_length, rope=self.rope,
            dtype=weight.dtype, device=weight.device, budget_bytes=budget_bytes,
        )  # fmt: skip


def transformer_config(
    shape: ModelShape, groups: RoleGroups, dtype: torch.dtype, layout: TrainingLayoutConfig | None = None
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape.num_layers, hidden_size=shape.hidden_size, ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads, num_query_groups=shape.num_kv_heads, kv_channels=shape.head_dim,
        normalization="RMSNorm", layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=shape.traits.biased, add_qkv_bias=shape.traits.qkv_bias, qk_layernorm=shape.traits.qk_norm == "head",
        hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=groups.tp, pipeline_model_parallel_size=groups.pp,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,  # every weight comes from a checkpoint or a seeded source
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        bias_activation_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
        use_te_activation_func=True,  # the layer spec's own, whoever made it
        variable_seq_lengths=layout is None or layout.vpp == 1,  # packed micro-batches differ in length
        batch_p2p_sync=False,  # for torch before 1.12: the host would wait for the device in every message between stages
        moe_token_dispatcher_type="alltoall",  # noqa: S106  (no secret: megatron requires it for variable lengths)
        calculate_per_token_loss=True,  # losses are shares of a minibatch's: they add up, over replicas too
        **({} if layout is None else _training_options(layout, groups)),
    )  # fmt: skip


def _training_options(layout: TrainingLayoutConfig, groups: RoleGroups) -> dict[str, Any]:
    assert layout.vpp == 1 or groups.pp > 1, "one pipeline stage cannot be interleaved"
    options: dict[str, Any] = {"sequence_parallel": layout.sequence_parallel and groups.tp > 1}
    if layout.vpp > 1:
        options |= {
            "virtual_pipeline_model_parallel_size": layout.vpp,
            # Batched messages between two stages, each the other's neighbour on both sides, would be taken for each other.
            "batch_p2p_comm": False,
            "overlap_p2p_comm": True,
        }
    if layout.recompute != "none":
        options |= {"recompute_granularity": layout.recompute}
    if layout.recompute == "full":
        options |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    return options


def build_model(shape: ModelShape, groups: RoleGroups, **options: Any) -> RoleModel:
    return build_chunks(shape, groups, None, **options)[0]


def build_chunks(
    shape: ModelShape, groups: RoleGroups, layout: TrainingLayoutConfig | None, *, head: Head, max_length: int, dtype: str,
    device: torch.device, layers: LayerKind = "torch",
) -> list[RoleModel]:  # fmt: skip
    """Return chunks without weights.  Raises CapacityError if `max_length` is too large."""
    if max_length > shape.max_positions:
        raise CapacityError(
            f"sequences of {max_length} tokens exceed the model's {shape.max_positions} positions; lower "
            "data.max_prompt_tokens or rollout.max_response_tokens."
        )
    compat.install()
    compat.make_scratch_memory()
    initialize_rng_tracker(inference_rng_tracker=True)  # the model has no dropout
    config = transformer_config(shape, groups, DTYPES[dtype], layout)  # megatron wants one object for all chunks
    chunks = []
    for number in range(1 if layout is None else layout.vpp):
        chunk = RoleModel(shape, groups, config, head, max_length, number, layers).to(device)
        compat.mark_shards(chunk)
        chunk.set_rope(device)
        chunks.append(chunk)
    return chunks


@torch.inference_mode()
def step(
    model: RoleModel, kv: SequenceCache, seq_ids: Sequence[int], lens: Sequence[int], inputs: Tensor,
    rows_R: Tensor | None = None, routing: Routing | None = None,
) -> Tensor:  # fmt: skip
    """Append lens[s] tokens (later stages: hidden states [T, 1, H]) to each cache; return the stage's output."""
    plan = kv.begin(seq_ids, lens)
    plan.routing = routing
    if model.pre_process:
        out = model(inputs, plan, rows_R)
    else:
        model.set_input_tensor(inputs)
        out = model(None, plan, rows_R)
        model.set_input_tensor(None)  # release it
    kv.commit(plan)
    return out
