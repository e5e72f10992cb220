"""The shape of a model, read from a Hugging Face `config.json` of the Llama / Qwen2 / Qwen2.5 / Qwen3 family."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oppo_megatron.errors import CheckpointError

FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of one decoder.  `hf` is the mapping that it was read from, kept for writing it back."""

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
    hf: Mapping[str, Any] = field(repr=False, compare=False, default_factory=dict)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str = "config.json") -> ModelShape:
        """Read the mapping.  Raises CheckpointError for a family or feature that this runtime does not compute."""
        family = hf.get("model_type")
        if family not in FAMILIES:
            raise CheckpointError(
                f"{where}: model_type {family!r} is not supported; this runtime computes {sorted(FAMILIES)}. "
                "Use a checkpoint of one of these families."
            )
        missing = [key for key in _REQUIRED if key not in hf]
        if missing:
            raise CheckpointError(f"{where}: {missing} missing; a {family} config.json must give them.")
        _refuse_unsupported(hf, where)
        heads = int(hf["num_attention_heads"])
        return cls(
            family=str(family),
            num_layers=int(hf["num_hidden_layers"]),
            hidden_size=int(hf["hidden_size"]),
            ffn_size=int(hf["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(hf.get("num_key_value_heads") or heads),
            head_dim=int(hf.get("head_dim") or (128 if family == "qwen3" else int(hf["hidden_size"]) // heads)),
            vocab_size=int(hf["vocab_size"]),
            max_positions=int(hf.get("max_position_embeddings", 2048 if family == "llama" else 32768)),
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            init_std=float(hf.get("initializer_range", 0.02)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
            rope=_rope(hf, where),
            hf=copy.deepcopy(dict(hf)),
        )

    @property
    def causal_lm_class(self) -> str:
        return f"{FAMILIES[self.family]}ForCausalLM"

    @property
    def classifier_class(self) -> str:
        return f"{FAMILIES[self.family]}ForSequenceClassification"


_REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def _rope(hf: Mapping[str, Any], where: str) -> dict[str, Any]:
    """RoPE parameters in one form: `rope_parameters` of newer configs, `rope_theta` + `rope_scaling` of older ones."""
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope.setdefault("rope_theta", hf.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    if rope["rope_type"] not in ROPE_KINDS:
        raise CheckpointError(
            f"{where}: rope type {rope['rope_type']!r} is not supported; supported: {list(ROPE_KINDS)}."
        )
    return rope


def _refuse_unsupported(hf: Mapping[str, Any], where: str) -> None:
    wrong = []
    if hf.get("hidden_act", "silu") != "silu":
        wrong.append(f"hidden_act {hf['hidden_act']!r} (only silu)")
    if hf.get("use_sliding_window"):
        wrong.append("use_sliding_window true (only full attention)")
    for name in ("attention_bias", "mlp_bias"):
        if hf.get(name):
            wrong.append(f"{name} true (only Qwen2's query/key/value bias)")
    if wrong:
        raise CheckpointError(f"{where}: not supported: " + "; ".join(wrong) + ".")
