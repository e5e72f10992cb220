"""Shapes of published models."""

from __future__ import annotations

from oppo_megatron.layout.flops import Shape


def llama_shape(hidden: int, ffn: int, layers: int, heads: int, keys: int, vocab: int) -> Shape:
    """The sizes of a Llama `config.json`; `keys`: its key/value heads."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocab,
    }
