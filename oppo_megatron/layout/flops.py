"""Operations and bytes of a model's forward, matrix products alone (the rest is a few percent).

h hidden, q = heads x head size, g = key/value heads x head size, f FFN, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oppo_megatron.layout.shape import DTYPE_BYTES, head_dim, num_kv_heads

Shape = Mapping[str, Any]


@dataclass(frozen=True)
class Linear:
    """A weight matrix, `out` x `into`."""

    out: int
    into: int

    @property
    def size(self) -> int:
        return self.out * self.into


def layer_linears(shape: Shape) -> list[Linear]:
    """A layer's products: qkv, output, gate with up, down."""
    hidden, ffn, dim = shape["hidden_size"], shape["intermediate_size"], head_dim(shape)
    query, keys = shape["num_attention_heads"] * dim, num_kv_heads(shape) * dim
    return [Linear(query + 2 * keys, hidden), Linear(hidden, query), Linear(2 * ffn, hidden), Linear(hidden, ffn)]


def head_linear(shape: Shape, *, scalar: bool) -> Linear:
    return Linear(1 if scalar else shape["vocab_size"], shape["hidden_size"])


def forward_flops(shape: Shape, tokens: int, pairs: int, rows: int, *, scalar: bool) -> int:
    """Operations of a forward over `tokens`, `rows` of them with outputs; `pairs`: see `causal_pairs`.

    2 tokens (h (q + 2 g) + q h + 3 h f) + 4 q pairs per layer, and 2 rows h V (scalar head: 2 rows h).
    """
    query = int(shape["num_attention_heads"]) * head_dim(shape)
    products = 2 * tokens * sum(linear.size for linear in layer_linears(shape))
    layers = int(shape["num_hidden_layers"])
    return layers * (products + 4 * query * pairs) + 2 * rows * head_linear(shape, scalar=scalar).size


def training_flops(shape: Shape, tokens: int, pairs: int, rows: int, *, scalar: bool) -> int:
    """Three forwards: each product again for its input's gradient and its weight's."""
    return 3 * forward_flops(shape, tokens, pairs, rows, scalar=scalar)


def causal_pairs(past: int, new: int) -> int:
    """Pairs of `new` tokens after `past` ones."""
    return new * past + new * (new + 1) // 2


def weight_bytes(shape: Shape, dtype: str, *, scalar: bool) -> int:
    """Bytes of all matrices that a forward reads (single rows of the embedding do not count)."""
    layers = int(shape["num_hidden_layers"]) * sum(linear.size for linear in layer_linears(shape))
    return DTYPE_BYTES[dtype] * (layers + head_linear(shape, scalar=scalar).size)
