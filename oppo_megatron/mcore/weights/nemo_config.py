"""The `model_config.yaml` that NeMo 1 and NeMo-Aligner read next to `model_weights/`: the settings that weights do not have.

Keys and values follow NeMo's own converters of Llama, Mistral and Qwen2.  Settings of a training run (batch sizes, layouts,
data, optimizer) are in the configuration of that run, which overrides this one.
"""

from __future__ import annotations

from typing import Any

from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.model_shape import ModelShape

TARGETS = {
    "lm": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
    "scalar": "nemo_aligner.models.nlp.gpt.megatron_gpt_reward_model.MegatronGPTRewardModel",
}
CONFIG_NAME = "model_config.yaml"


def nemo_config(shape: ModelShape, head: Head, tokenizer: str) -> dict[str, Any]:
    """The mapping; `tokenizer` is a Hugging Face tokenizer's folder or name.

    Raises ConfigError for what NeMo 1's configuration cannot say.
    """
    scaling, window = _scaling(shape), _window(shape)
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
        "qkv_bias": shape.qkv_bias,
        "activation": "fast-swiglu",
        "position_embedding_type": "rope",
        "rotary_percentage": 1.0,
        "rotary_base": shape.rope["rope_theta"],
        **scaling,
        **window,
        "share_embeddings_and_output_weights": shape.tied_embeddings,
        "make_vocab_size_divisible_by": _divisor(shape.vocab_size),
        "apply_query_key_layer_scaling": False,
        "tokenizer": {"library": "huggingface", "type": tokenizer, "use_fast": True},
    }


def _scaling(shape: ModelShape) -> dict[str, Any]:
    kind = shape.rope["rope_type"]
    if shape.qk_norm or kind not in ("default", "linear"):
        what = "norms of queries and keys" if shape.qk_norm else f"RoPE of the kind {kind}"
        raise ConfigError(
            f"the model has {what}, which NeMo 1's model_config.yaml cannot say; convert --to megatron, and import that "
            "with a program that computes it"
        )
    return {"seq_len_interpolation_factor": shape.rope["factor"]} if kind == "linear" else {}


def _window(shape: ModelShape) -> dict[str, Any]:
    """NeMo's window: numbers of positions before and after a token's own."""
    window, *others = set(shape.windows)
    if others:
        raise ConfigError(
            "the model has a sliding window in some of its layers, which NeMo 1's model_config.yaml cannot say; convert --to "
            "megatron, and import that with a program that computes it"
        )
    return {} if window is None else {"window_size": [window - 1, 0]}


def _divisor(vocab_size: int) -> int:
    """Return the largest power of two up to 128 that divides the vocabulary, so that NeMo's padding adds no row."""
    return next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if vocab_size % size == 0)
