"""A model's shape, from its Hugging Face `config.json`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oppo_megatron.errors import CheckpointError
from oppo_megatron.layout.layouts import vocab_rows
from oppo_megatron.layout.shape import FAMILIES, check_model, head_dim, max_positions, num_kv_heads, windows


@dataclass(frozen=True)
class ModelShape:
    """`windows`: tokens a layer attends to, own included (None: all); `vocab_multiple`: padding of the vocabulary."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    init_std: float
    qkv_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    rope: Mapping[str, Any]
    windows: tuple[int | None, ...]
    vocab_multiple: int = 1
    hf: Mapping[str, Any] = field(repr=False, compare=False, default_factory=dict)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str = "config.json") -> ModelShape:
        """Raises CheckpointError for an unsupported family or feature."""
        if problems := check_model(where, hf):
            raise CheckpointError("\n".join(problems))
        family = hf["model_type"]
        return cls(
            family=str(family),
            num_layers=int(hf["num_hidden_layers"]),
            hidden_size=int(hf["hidden_size"]),
            ffn_size=int(hf["intermediate_size"]),
            num_heads=int(hf["num_attention_heads"]),
            num_kv_heads=num_kv_heads(hf),
            head_dim=head_dim(hf),
            vocab_size=int(hf["vocab_size"]),
            max_positions=max_positions(hf),
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            init_std=float(hf.get("initializer_range", 0.02)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
            rope=_rope(hf),
            windows=tuple(windows(hf)),
            hf=copy.deepcopy(dict(hf)),
        )

    def vocab_rows(self, tp: int) -> int:
        return vocab_rows(self.vocab_size, tp, self.vocab_multiple)

    @property
    def causal_lm_class(self) -> str:
        return f"{FAMILIES[self.family]}ForCausalLM"

    @property
    def classifier_class(self) -> str:
        return f"{FAMILIES[self.family]}ForSequenceClassification"


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling` of older configs."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope.setdefault("rope_theta", hf.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    return rope
