"""Floating-point operations and bytes of a model's forward, counted from its `config.json`.  Pure.

Only matrix products count, a multiply and an add as two operations: the projections and the feed-forward of each layer,
the scores and the weighted values of attention, and the head.  Norms, rotations, activations, softmax, sampling and the
look-up of embeddings are left out; for the models of this package they are some percent.

Legend: h hidden, q = heads x head size, g = key/value heads x head size, f FFN, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oppo_megatron.layout.shape import DTYPE_BYTES, head_dim, num_kv_heads

Shape = Mapping[str, Any]
"""A `config.json` that the checks let through."""


@dataclass(frozen=True)
class Linear:
    """A weight matrix: `out` x `into`."""

    out: int
    into: int

    @property
    def size(self) -> int:
        return self.out * self.into


def layer_linears(shape: Shape) -> list[Linear]:
    """The products of one layer as they are called: queries with keys and values, output, gate with up, down."""
    hidden, ffn, dim = shape["hidden_size"], shape["intermediate_size"], head_dim(shape)
    query, keys = shape["num_attention_heads"] * dim, num_kv_heads(shape) * dim
    return [Linear(query + 2 * keys, hidden), Linear(hidden, query), Linear(2 * ffn, hidden), Linear(hidden, ffn)]


def head_linear(shape: Shape, *, scalar: bool) -> Linear:
    """The head: V x h of a language model, 1 x h of a value or reward model."""
    return Linear(1 if scalar else shape["vocab_size"], shape["hidden_size"])


def forward_flops(shape: Shape, tokens: int, pairs: int, rows: int, *, scalar: bool) -> int:
    """Operations of a forward over `tokens` new tokens; `rows` of them get an output.

    2 tokens (h (q + 2 g) + q h + 3 h f) + 4 q pairs in each layer, and 2 rows h V (scalar head: 2 rows h).  `pairs` counts
    each token with each position that it attends to, itself included (`causal_pairs`): scores and weighted values take
    2 q operations each.
    """
    query = int(shape["num_attention_heads"]) * head_dim(shape)
    products = 2 * tokens * sum(linear.size for linear in layer_linears(shape))
    layers = int(shape["num_hidden_layers"])
    return layers * (products + 4 * query * pairs) + 2 * rows * head_linear(shape, scalar=scalar).size


def training_flops(shape: Shape, tokens: int, pairs: int, rows: int, *, scalar: bool) -> int:
    """Forward and backward, each product once more for its input's gradient and once for its weight's: three forwards.

    Recomputation of activations and the optimizer's own arithmetic are left out.
    """
    return 3 * forward_flops(shape, tokens, pairs, rows, scalar=scalar)


def causal_pairs(past: int, new: int) -> int:
    """Pairs of `new` tokens after `past` cached ones: the first attends to past + 1 positions, the last to past + new."""
    return new * past + new * (new + 1) // 2


def weight_bytes(shape: Shape, dtype: str, *, scalar: bool) -> int:
    """Bytes of all matrices that a forward pass reads: layers and head; only single rows of the embedding are read."""
    layers = int(shape["num_hidden_layers"]) * sum(linear.size for linear in layer_linears(shape))
    return DTYPE_BYTES[dtype] * (layers + head_linear(shape, scalar=scalar).size)
