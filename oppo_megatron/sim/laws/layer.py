"""Seconds of a layer's parts on one tensor rank, from its shape, a processor's peaks and constants fitted to measurements.

    products     ((F / (c P))^k + (B / (m W))^k)^(1/k) + f      F operations, B bytes of weights and of what goes in and out
    elementwise  f_e + bytes / (m_e W)                          norms, rotations, activation, sums
    attention    pairs: 4 q operations each, over a P;          cached: keys and values read, over m W
    head         the larger of its operations over c P and its weights over m W

P and W are the processor's operations and bytes per second; the other letters are its `Efficiencies`.  All sizes are those of
one tensor rank, all values in two bytes.  `tokens` may be an array of numpy; then so is what comes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from oppo_megatron.layout.flops import Shape, head_linear, layer_linears
from oppo_megatron.layout.shape import head_dim, num_kv_heads
from oppo_megatron.sim.clusters.gpus import Efficiencies, Gpu

Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", float, Floats)
WIDTH = 2
"""Bytes of a value."""


@dataclass(frozen=True)
class LayerSizes:
    """Numbers of values of one layer on one of `tp` tensor ranks.

    `weights`: of its four products. `moved`: a token's values that go into and out of them. `hidden`: of a token between
    products, on every tensor rank; `inner`: of a token in rotations and activation. `queries`, `keys`: of a token's queries, and
    its keys and values.
    """

    weights: float
    moved: float
    hidden: float
    inner: float
    queries: float
    keys: float

    @classmethod
    def of(cls, shape: Shape, tp: int) -> LayerSizes:
        hidden, ffn = shape["hidden_size"], shape["intermediate_size"]
        query = shape["num_attention_heads"] * head_dim(shape)
        key = num_kv_heads(shape) * head_dim(shape)
        return cls(
            weights=sum(linear.size for linear in layer_linears(shape)) / tp,
            moved=4 * hidden + (2 * query + 2 * key + 3 * ffn) / tp,
            hidden=hidden,
            inner=(2 * (query + key) + 3 * ffn) / tp,
            queries=query / tp,
            keys=2 * key / tp,
        )

    def product_flops(self, tokens: Number) -> Number:
        return 2 * self.weights * tokens

    def product_bytes(self, tokens: Number) -> Number:
        return WIDTH * (self.weights + self.moved * tokens)

    def elementwise_bytes(self, tokens: Number, *, sums: int = 2, hidden_share: float = 1.0) -> Number:
        """Two norms that read and write, `sums` of two tensors, rotations and activation.

        `hidden_share` of a token's hidden values is on this rank: 1 / tp with sequence parallelism.
        """
        return WIDTH * tokens * ((2 * 2 + 3 * sums) * self.hidden * hidden_share + self.inner)


def roofline_s(flops: Number, num_bytes: Number, gpu: Gpu, by: Efficiencies) -> Number:
    """The smooth maximum of operations over their peak and bytes over theirs, without the fixed part."""
    compute, memory = flops / (by.compute * gpu.flops), num_bytes / (by.memory * gpu.bytes_per_s)
    seconds: Number = (compute**by.power + memory**by.power) ** (1 / by.power)
    return seconds


@dataclass(frozen=True)
class LayerLaw:
    gpu: Gpu

    def products_s(self, sizes: LayerSizes, tokens: Number) -> Number:
        by = self.gpu.efficiencies
        return roofline_s(sizes.product_flops(tokens), sizes.product_bytes(tokens), self.gpu, by) + by.fixed_s

    def elementwise_s(self, sizes: LayerSizes, tokens: Number, *, sums: int = 2, hidden_share: float = 1.0) -> Number:
        by = self.gpu.efficiencies
        num_bytes = sizes.elementwise_bytes(tokens, sums=sums, hidden_share=hidden_share)
        return by.elementwise_fixed_s + num_bytes / (by.elementwise * self.gpu.bytes_per_s)

    def attention_s(self, sizes: LayerSizes, pairs: float) -> float:
        """Seconds of attention of new tokens over `pairs` (token, position) pairs (`causal_pairs`)."""
        return 4 * sizes.queries * pairs / (self.gpu.efficiencies.attention * self.gpu.flops)

    def cached_attention_s(self, sizes: LayerSizes, positions: float) -> float:
        """Seconds of attention while decoding, which reads keys and values of `positions` of all sequences."""
        return WIDTH * sizes.keys * positions / (self.gpu.efficiencies.memory * self.gpu.bytes_per_s)

    def head_s(self, shape: Shape, tp: int, rows: float) -> float:
        """Seconds of the logits of `rows` tokens."""
        by, size = self.gpu.efficiencies, head_linear(shape, scalar=False).size / tp
        compute = 2 * rows * size / (by.compute * self.gpu.flops)
        return max(compute, WIDTH * size / (by.memory * self.gpu.bytes_per_s))

    def plain_s(self, num_bytes: float) -> float:
        """Seconds of memory-bound passes over large tensors."""
        return num_bytes / (self.gpu.efficiencies.plain * self.gpu.bytes_per_s)
