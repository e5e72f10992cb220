"""Seconds of collectives and messages on a cluster, and of moves of weights.

    t = alpha + factor x payload / bandwidth        factor: all-reduce 2 (n - 1) / n, its halves (n - 1) / n, messages 1

Groups over several nodes are rings: their bus bandwidth is the smaller of that of a node's links and of the NICs that they
have, and less for payloads that are small for so many nodes (aliyun/SimAI, astra-sim/system/calbusbw and
inputs/ratio/nic_ratio.csv).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.clusters.links import MIB, Between
from oppo_megatron.sim.clusters.sources import Source, published

NIC_SHARE = 0.94
"""Of the line rate of a NIC that a ring reaches with large payloads: 23.5 of 25 GB/s, 48.5 of 50 (SimAI)."""
RATIO_NODES = (2, 16, 128)
RATIO_MIB = (16, 1024, 16384)
RATIOS = ((0.32, 0.92, 0.96), (0.05, 0.76, 0.96), (0.009, 0.31, 0.92))
"""By number of nodes and size, relative to the largest size (SimAI)."""
RINGS: Source = published("aliyun/SimAI, calbusbw and nic_ratio.csv")
PIECE_BYTES = 64 * MIB


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `size` of them on `nodes` nodes, as many on each; `beside` such groups share each node's NICs."""

    size: int
    nodes: int = 1
    beside: int = 1

    @classmethod
    def of(cls, cluster: Cluster, ranks: Iterable[int], beside: int = 1) -> Group:
        members = list(ranks)
        return cls(len(members), len({cluster.node_of(rank) for rank in members}), beside)


def all_reduce_s(cluster: Cluster, group: Group, payload: float) -> float:
    """Seconds until every rank has the sum of `payload` bytes a rank."""
    return _ring_s(cluster, group, payload, 2 * (group.size - 1) / group.size)


def scatter_s(cluster: Cluster, group: Group, payload: float) -> float:
    """A reduce-scatter of `payload` bytes a rank, or an all-gather into as many."""
    return _ring_s(cluster, group, payload, (group.size - 1) / group.size)


def send_s(cluster: Cluster, payload: float, *, between: bool, beside: int = 1) -> float:
    """A message from one rank to another; between nodes it has its share of the NICs among `beside` that go at once."""
    if not between:
        return cluster.inside.send.seconds(payload, 1)
    network = network_of(cluster)
    return network.alpha_s + payload / nic_rate(network, beside)


def nic_rate(network: Between, beside: int) -> float:
    """Bytes a second that each of `beside` flows out of a node has: at most a NIC, at least its share of all."""
    return NIC_SHARE * network.bytes_per_s * min(1.0, network.nics / beside)


def ring_efficiency(nodes: int, payload: float) -> float:
    """Of a ring over `nodes` nodes.  Straight over the logarithms of both; below 16 MiB a ring takes as long as with 16."""
    mib = payload / MIB
    by_nodes = [float(np.interp(np.log(max(mib, 1e-9)), np.log(RATIO_MIB), row)) for row in RATIOS]
    at_size = float(np.interp(np.log(nodes), np.log(RATIO_NODES), by_nodes))
    return at_size * min(1.0, mib / RATIO_MIB[0])


def network_of(cluster: Cluster) -> Between:
    """The network of a cluster of several nodes."""
    assert cluster.between is not None, "the schema asks for it where there are several nodes"
    return cluster.between


def _ring_s(cluster: Cluster, group: Group, payload: float, factor: float) -> float:
    if group.size == 1 or payload <= 0:
        return 0.0
    if group.nodes == 1:
        return cluster.inside.of_ranks(group.size).seconds(payload, factor)
    network = network_of(cluster)
    in_node = group.size // group.nodes
    rate = NIC_SHARE * network.node_bytes_per_s / group.beside
    if in_node > 1:
        rate = min(rate, cluster.inside.of_ranks(in_node).peak)
    else:
        rate = min(rate, NIC_SHARE * network.bytes_per_s)
    return network.alpha_s + factor * payload / (rate * ring_efficiency(group.nodes, payload))


@dataclass
class Moves:
    """Bytes that move between ranks at once.  Concurrent moves through one rank, or through one node's NICs, add up."""

    cluster: Cluster
    sent: dict[int, float] = field(default_factory=dict)
    received: dict[int, float] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    entered: dict[int, float] = field(default_factory=dict)
    pieces: dict[int, int] = field(default_factory=dict)

    def add(self, source: int, target: int, num_bytes: float) -> None:
        """A message; within a rank it costs nothing."""
        if source == target or num_bytes <= 0:
            return
        here, there = self.cluster.node_of(source), self.cluster.node_of(target)
        if here == there:
            _count(self.sent, source, num_bytes)
            _count(self.received, target, num_bytes)
        else:
            _count(self.left, here, num_bytes)
            _count(self.entered, there, num_bytes)
        self.pieces[target] = self.pieces.get(target, 0) + -(-int(num_bytes) // PIECE_BYTES)

    def seconds(self) -> float:
        """Until the fullest rank and the fullest node are done: bytes over bandwidth, and a latency a piece of 64 MiB."""
        cluster = self.cluster
        within = max((*self.sent.values(), *self.received.values()), default=0.0)
        times = [cluster.inside.send.seconds(within, 1) if within else 0.0]
        across = max((*self.left.values(), *self.entered.values()), default=0.0)
        alpha = 0.0
        if across:
            network = network_of(cluster)
            times.append(across / (NIC_SHARE * network.node_bytes_per_s))
            alpha = network.alpha_s
        return max(times) + alpha * max(self.pieces.values(), default=0)


def _count(sums: dict[int, float], key: int, num_bytes: float) -> None:
    sums[key] = sums.get(key, 0.0) + num_bytes
