"""Writes a Megatron `torch_dist` checkpoint and NeMo's configuration, one parameter at a time."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint import FileSystemWriter, SavePlan, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.families import BEFORE
from oppo_megatron.layout.hf_layout import Head, Part, param_shapes, stage_parts
from oppo_megatron.layout.shape import ModelShape
from oppo_megatron.mcore.weights.dist_source import ALIGNER_BIAS, ALIGNER_HEAD, HEAD, saved_names
from oppo_megatron.mcore.weights.hf_source import TensorSource
from oppo_megatron.mcore.weights.hf_weights import put_part


@dataclass(frozen=True)
class Naming:
    """`keeps_output`: a scalar model has an unused output layer."""

    prefix: str = ""
    scalar_head: str = HEAD
    scalar_bias: str | None = None
    keeps_output: bool = False


MEGATRON = Naming()
ALIGNER = Naming("model.", ALIGNER_HEAD, ALIGNER_BIAS, keeps_output=True)


@dataclass(frozen=True)
class _Saved:
    """Place in tensor `key` of shape `size`: all or one layer; zeros without parts."""

    key: str
    size: tuple[int, ...]
    layer: int | None
    parts: Sequence[Part]


def write_dist(
    shape: ModelShape, source: TensorSource, weights: Path, *, head: Head, dtype: torch.dtype, naming: Naming = MEGATRON
) -> int:
    """Write `source`; return the number of tensors (stacked layers: one)."""
    planned = list(_planned(shape, head, naming))
    weights.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no_dist asks for that
        save({}, storage_writer=FileSystemWriter(weights), planner=_LazyPlanner(planned, source, dtype), no_dist=True)
    torch.save({}, weights / COMMON_STATE_FNAME)
    (weights / CONFIG_FNAME).write_text(json.dumps(asdict(CheckpointingConfig("torch_dist", 1))), encoding="utf-8")
    return len({saved.key for saved in planned})


def _planned(shape: ModelShape, head: Head, naming: Naming) -> Iterator[_Saved]:
    parts = stage_parts(shape, head)
    sizes = param_shapes(parts)
    for param, group in itertools.groupby(parts, key=lambda part: part.param):
        (key, layer), *_ = saved_names(param, shape)
        if key == HEAD and head == "scalar":
            key = naming.scalar_head
        size = sizes[param] if layer is None else (shape.num_layers, *sizes[param])
        yield _Saved(naming.prefix + key, size, layer, list(group))
    if head == "scalar" and naming.scalar_bias is not None:
        yield _Saved(naming.prefix + naming.scalar_bias, (1,), None, [])
    if head == "scalar" and naming.keeps_output and not shape.tied_embeddings:
        yield _Saved(naming.prefix + HEAD, (shape.vocab_size, shape.hidden_size), None, [])


class _LazyPlanner(DefaultSavePlanner):
    def __init__(self, planned: Sequence[_Saved], source: TensorSource, dtype: torch.dtype):
        super().__init__(flatten_state_dict=False)
        self._planned = {(saved.key, (saved.layer or 0,) + (0,) * (len(saved.size) - 1)): saved for saved in planned}
        self._source, self._dtype = source, dtype

    def create_local_plan(self) -> SavePlan:
        items = []
        for (key, place), saved in self._planned.items():
            offset, size = torch.Size(place), torch.Size(saved.size)
            chunk = ChunkStorageMetadata(offset, size if saved.layer is None else torch.Size((1, *size[1:])))
            data = TensorWriteData(chunk, TensorProperties(dtype=self._dtype), size)
            items.append(WriteItem(MetadataIndex(key, offset), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        saved = self._planned[write_item.index.fqn, tuple(cast(torch.Size, write_item.index.offset))]
        param = torch.zeros(saved.size if saved.layer is None else saved.size[1:], dtype=self._dtype)
        for part in saved.parts:
            put_part(param, part, self._source.read(part.hf_name, part.share(0, 1)))
        return param if saved.layer is None else param[None]


TARGETS = {
    "lm": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
    "scalar": "nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model.MegatronGPTRewardModel",
}
CONFIG_NAME = "model_config.yaml"


def nemo_config(shape: ModelShape, head: Head, tokenizer: str) -> dict[str, Any]:
    """Return NeMo's `model_config.yaml`.  Raises ConfigError if it cannot describe the model."""
    (window, *others), row, kind = set(shape.windows), shape.traits, shape.ropes[0]["rope_type"]
    lacking = None
    if shape.experts is not None:
        lacking = "experts"
    elif row.norms != BEFORE:
        lacking = "norms after attention and feed-forward"
    elif row.qk_norm or kind not in ("default", "linear"):
        lacking = "norms of queries and keys" if row.qk_norm else f"RoPE of the kind {kind}"
    elif others:
        lacking = "a sliding window in some of its layers"
    if lacking is not None:
        raise ConfigError(
            f"the model has {lacking}, which NeMo 1's model_config.yaml cannot express; convert --to megatron, and import that "
            "with a program that computes it"
        )
    return {
        "target": TARGETS[head],
        "mcore_gpt": True,
        "transformer_engine": True,
        "encoder_seq_length": shape.max_positions,
        "max_position_embeddings": shape.max_positions,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "init_method_std": shape.init_std,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "ffn_dropout": 0.0,
        "normalization": "rmsnorm",
        "layernorm_epsilon": shape.norm_eps,
        "bias": False,
        "qkv_bias": row.qkv_bias,
        "activation": "fast-swiglu",
        "position_embedding_type": "rope",
        "rotary_percentage": shape.rotary_dim / shape.head_dim,
        "rotary_base": shape.ropes[0]["rope_theta"],
        **({"seq_len_interpolation_factor": shape.ropes[0]["factor"]} if kind == "linear" else {}),
        # numbers of positions before and after a token's own
        **({} if window is None else {"window_size": [window - 1, 0]}),
        "share_embeddings_and_output_weights": shape.tied_embeddings,
        "make_vocab_size_divisible_by": math.gcd(shape.vocab_size, 128),  # so that NeMo adds no row
        "apply_query_key_layer_scaling": False,
        "tokenizer": {"library": "huggingface", "type": tokenizer, "use_fast": True},
    }
