"""Seconds of a layer's parts on a tensor rank, of messages, and of moves of weights (docs/planner.md, "The laws").

Groups over nodes are rings, limited by links and NICs, and slower for small payloads (aliyun/SimAI,
astra-sim/system/calbusbw and inputs/ratio/nic_ratio.csv).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from oppo_megatron.layout.experts import experts_of, ffn_width
from oppo_megatron.layout.families import traits
from oppo_megatron.layout.shape import Shape, head_dim, head_linear, layer_weights, num_kv_heads
from oppo_megatron.sim.clusters.cluster import MIB, Between, Cluster, Gpu, Source, published

Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", float, Floats)
WIDTH = 2
"""Bytes of a value."""


@dataclass(frozen=True)
class LayerSizes:
    """Values on a tensor rank: `weights` of a token's products; per token, `moved` by them, `inner` in rotations and activation.

    `others`: weights of the experts that a token leaves out; `skipped`: share of the experts that it leaves out.
    """

    weights: float
    moved: float
    hidden: float
    inner: float
    queries: float
    keys: float
    others: float = 0.0
    skipped: float = 0.0
    norms: int = 2

    @classmethod
    def of(cls, shape: Shape, tp: int) -> LayerSizes:
        hidden, ffn, experts = shape["hidden_size"], ffn_width(shape, active=True), experts_of(shape)
        active = 0 if experts is None else experts.active
        others = 3 * hidden * (ffn_width(shape) - ffn)
        query = shape["num_attention_heads"] * head_dim(shape)
        key = num_kv_heads(shape) * head_dim(shape)
        return cls(
            weights=(layer_weights(shape) - others) / tp,
            moved=4 * hidden + (2 * query + 2 * key + 3 * ffn + 2 * active * hidden) / tp,
            hidden=hidden,
            inner=(2 * (query + key) + 3 * ffn + 6 * active * hidden) / tp,  # each expert's input is copied, and output summed
            queries=query / tp,
            keys=2 * key / tp,
            others=others / tp,
            skipped=0.0 if experts is None else 1 - experts.active / experts.count,
            norms=len(traits(shape).norms),
        )

    def product_flops(self, tokens: Number) -> Number:
        return 2 * self.weights * tokens

    def product_bytes(self, tokens: Number) -> Number:
        """Tokens choose their experts evenly and independently."""
        read = self.weights + self.others * (1 - self.skipped ** (tokens - 1)) if self.others else self.weights
        return WIDTH * (read + self.moved * tokens)

    def elementwise_bytes(self, tokens: Number, *, sums: int = 2, hidden_share: float = 1.0) -> Number:
        """Norms, `sums` of two tensors, rotations and activation; this rank has `hidden_share` of hidden values."""
        return WIDTH * tokens * ((2 * self.norms + 3 * sums) * self.hidden * hidden_share + self.inner)


@dataclass(frozen=True)
class LayerLaw:
    gpu: Gpu

    def products_s(self, sizes: LayerSizes, tokens: Number) -> Number:
        """Smooth maximum of compute and memory time, and the fixed part."""
        by = self.gpu.efficiencies
        compute = sizes.product_flops(tokens) / (by.compute * self.gpu.flops)
        memory = sizes.product_bytes(tokens) / (by.memory * self.gpu.bytes_per_s)
        seconds: Number = (compute**by.power + memory**by.power) ** (1 / by.power)
        return seconds + by.fixed_s

    def elementwise_s(self, sizes: LayerSizes, tokens: Number, *, sums: int = 2, hidden_share: float = 1.0) -> Number:
        by = self.gpu.efficiencies
        num_bytes = sizes.elementwise_bytes(tokens, sums=sums, hidden_share=hidden_share)
        return by.elementwise_fixed_s + num_bytes / (by.elementwise * self.gpu.bytes_per_s)

    def attention_s(self, sizes: LayerSizes, pairs: float) -> float:
        return 4 * sizes.queries * pairs / (self.gpu.efficiencies.attention * self.gpu.flops)

    def cached_attention_s(self, sizes: LayerSizes, positions: float) -> float:
        return WIDTH * sizes.keys * positions / (self.gpu.efficiencies.memory * self.gpu.bytes_per_s)

    def head_s(self, shape: Shape, tp: int, rows: float) -> float:
        by, size = self.gpu.efficiencies, head_linear(shape, scalar=False).size / tp
        compute = 2 * rows * size / (by.compute * self.gpu.flops)
        return max(compute, WIDTH * size / (by.memory * self.gpu.bytes_per_s))

    def plain_s(self, num_bytes: float) -> float:
        return num_bytes / (self.gpu.efficiencies.plain * self.gpu.bytes_per_s)


Ints = npt.NDArray[np.int64]
NIC_SHARE = 0.94
"""Share of a NIC's line rate in large rings: 23.5 of 25 GB/s, 48.5 of 50 (SimAI)."""
RATIO_NODES = (2, 16, 128)
RATIO_MIB = (16, 1024, 16384)
RATIOS = ((0.32, 0.92, 0.96), (0.05, 0.76, 0.96), (0.009, 0.31, 0.92))
"""By number of nodes and size, relative to the largest (SimAI)."""
RINGS: Source = published("aliyun/SimAI, calbusbw and nic_ratio.csv")
PIECE_BYTES = 64 * MIB


@dataclass(frozen=True)
class Group:
    """`size` communicating ranks on `nodes` nodes; `sharing` such groups share a node's NICs."""

    size: int
    nodes: int = 1
    sharing: int = 1

    @classmethod
    def of(cls, cluster: Cluster, ranks: Iterable[int], sharing: int = 1) -> Group:
        members = list(ranks)
        return cls(len(members), len({cluster.node_of(rank) for rank in members}), sharing)


def all_reduce_s(cluster: Cluster, group: Group, payload: float) -> float:
    return _ring_s(cluster, group, payload, 2 * (group.size - 1) / group.size)


def scatter_s(cluster: Cluster, group: Group, payload: float) -> float:
    """Reduce-scatter of `payload` bytes, or all-gather into as many."""
    return _ring_s(cluster, group, payload, (group.size - 1) / group.size)


def send_s(cluster: Cluster, payload: float, *, between: bool, sharing: int = 1) -> float:
    if not between:
        return cluster.inside.send.seconds(payload, 1)
    network = network_of(cluster)
    return network.alpha_s + payload / (NIC_SHARE * network.bytes_per_s * min(1.0, network.nics / sharing))


def ring_efficiency(nodes: int, payload: float) -> float:
    """Linear in both logarithms; time is constant below 16 MiB."""
    mib = payload / MIB
    by_nodes = [float(np.interp(np.log(max(mib, 1e-9)), np.log(RATIO_MIB), row)) for row in RATIOS]
    at_size = float(np.interp(np.log(nodes), np.log(RATIO_NODES), by_nodes))
    return at_size * min(1.0, mib / RATIO_MIB[0])


def network_of(cluster: Cluster) -> Between:
    assert cluster.between is not None, "the schema asks for it if there are several nodes"
    return cluster.between


def _ring_s(cluster: Cluster, group: Group, payload: float, factor: float) -> float:
    if group.size == 1 or payload <= 0:
        return 0.0
    if group.nodes == 1:
        return cluster.inside.of_ranks(group.size).seconds(payload, factor)
    network = network_of(cluster)
    in_node = group.size // group.nodes
    rate = NIC_SHARE * network.node_bytes_per_s / group.sharing
    rate = min(rate, cluster.inside.of_ranks(in_node).peak if in_node > 1 else NIC_SHARE * network.bytes_per_s)
    return network.alpha_s + factor * payload / (rate * ring_efficiency(group.nodes, payload))


@dataclass
class Moves:
    """Concurrent moves between ranks; bytes through a rank or a node's NICs add up."""

    cluster: Cluster
    _parts: list[tuple[Ints, Ints, float, int]] = field(default_factory=list)

    def add(self, sources: Ints, targets: Ints, num_bytes: float, times: int = 1) -> None:
        apart = sources != targets
        if num_bytes > 0 and apart.any():
            self._parts.append((sources[apart], targets[apart], num_bytes, times))

    def seconds(self) -> float:
        if not self._parts:
            return 0.0
        cluster = self.cluster
        sources, targets = (np.concatenate([part[side] for part in self._parts]) for side in (0, 1))
        counts = [len(part[0]) for part in self._parts]
        num_bytes = np.repeat([part[2] * part[3] for part in self._parts], counts)
        here, there = sources // cluster.gpus_per_node, targets // cluster.gpus_per_node
        near, across = here == there, here != there
        within = max(_most(sources[near], num_bytes[near]), _most(targets[near], num_bytes[near]))
        times = [cluster.inside.send.seconds(within, 1) if within else 0.0]
        if not across.any():
            return max(times)
        network = network_of(cluster)
        through = max(_most(here[across], num_bytes[across]), _most(there[across], num_bytes[across]))
        times.append(through / (NIC_SHARE * network.node_bytes_per_s))
        pieces = np.repeat([part[3] * -(-int(part[2]) // PIECE_BYTES) for part in self._parts], counts)
        return max(times) + network.alpha_s * _most(targets, pieces)


def _most(places: Ints, amounts: Floats | Ints) -> float:
    return float(np.bincount(places, weights=amounts).max()) if len(places) else 0.0
