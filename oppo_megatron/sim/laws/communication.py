"""Seconds of collectives and messages on a cluster, and of moves of weights.

    t = alpha + factor x payload / bandwidth        factor: all-reduce 2 (n - 1) / n, its halves (n - 1) / n, messages 1

Groups over several nodes are rings: their bus bandwidth is the smaller one of a node's links and of the NICs that they
have, and less for payloads that are small for that number of nodes (aliyun/SimAI, astra-sim/system/calbusbw and
inputs/ratio/nic_ratio.csv).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.clusters.links import MIB, Between
from oppo_megatron.sim.clusters.sources import Source, published

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
NIC_SHARE = 0.94
"""Share of a NIC's line rate that a ring reaches with large payloads: 23.5 of 25 GB/s, 48.5 of 50 (SimAI)."""
RATIO_NODES = (2, 16, 128)
RATIO_MIB = (16, 1024, 16384)
RATIOS = ((0.32, 0.92, 0.96), (0.05, 0.76, 0.96), (0.009, 0.31, 0.92))
"""By number of nodes and size, relative to the largest size (SimAI)."""
RINGS: Source = published("aliyun/SimAI, calbusbw and nic_ratio.csv")
PIECE_BYTES = 64 * MIB


@dataclass(frozen=True)
class Group:
    """`size` ranks that communicate, as many on each of `nodes` nodes; `beside` such groups share each node's NICs."""

    size: int
    nodes: int = 1
    beside: int = 1

    @classmethod
    def of(cls, cluster: Cluster, ranks: Iterable[int], beside: int = 1) -> Group:
        members = list(ranks)
        return cls(len(members), len({cluster.node_of(rank) for rank in members}), beside)


def all_reduce_s(cluster: Cluster, group: Group, payload: float) -> float:
    """Seconds of an all-reduce of `payload` bytes per rank."""
    return _ring_s(cluster, group, payload, 2 * (group.size - 1) / group.size)


def scatter_s(cluster: Cluster, group: Group, payload: float) -> float:
    """Seconds of a reduce-scatter of `payload` bytes per rank, or of an all-gather into as many."""
    return _ring_s(cluster, group, payload, (group.size - 1) / group.size)


def send_s(cluster: Cluster, payload: float, *, between: bool, beside: int = 1) -> float:
    """Seconds of a message; between nodes it has its share of the NICs among `beside` concurrent ones."""
    if not between:
        return cluster.inside.send.seconds(payload, 1)
    network = network_of(cluster)
    return network.alpha_s + payload / nic_rate(network, beside)


def nic_rate(network: Between, beside: int) -> float:
    """Bytes per second of each of `beside` flows out of a node: at most a NIC, at least its share of all."""
    return NIC_SHARE * network.bytes_per_s * min(1.0, network.nics / beside)


def ring_efficiency(nodes: int, payload: float) -> float:
    """Efficiency of a ring over nodes, linear in both logarithms; below 16 MiB it takes as long as with 16."""
    mib = payload / MIB
    by_nodes = [float(np.interp(np.log(max(mib, 1e-9)), np.log(RATIO_MIB), row)) for row in RATIOS]
    at_size = float(np.interp(np.log(nodes), np.log(RATIO_NODES), by_nodes))
    return at_size * min(1.0, mib / RATIO_MIB[0])


def network_of(cluster: Cluster) -> Between:
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
    _parts: list[tuple[Ints, Ints, float, int]] = field(default_factory=list)

    def add(self, source: int, target: int, num_bytes: float) -> None:
        """Add a message; within a rank it costs nothing."""
        self.add_all(np.array([source]), np.array([target]), num_bytes)

    def add_all(self, sources: Ints, targets: Ints, num_bytes: float, times: int = 1) -> None:
        """Add `times` messages of the given bytes from each source to the target at the same place."""
        apart = sources != targets
        if num_bytes > 0 and apart.any():
            self._parts.append((sources[apart], targets[apart], num_bytes, times))

    def seconds(self) -> float:
        """Seconds of the fullest rank or node: bytes over bandwidth, and a latency per piece of 64 MiB."""
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
