"""A cluster of equal nodes of equal processors, what the engine takes beyond the laws, and cores that ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import log2
from typing import Annotated

from pydantic import Field, Strict
from pydantic.dataclasses import dataclass as checked

from oppo_megatron.sim.clusters.gpus import STRICT, Gpu, Seconds
from oppo_megatron.sim.clusters.links import Between, Inside
from oppo_megatron.sim.clusters.sources import Source, assumed, measured, published

Factor = Annotated[float, Strict(), Field(ge=0, le=1000)]
KEPT = 0.95
"""Share of both peaks that is kept at each doubling of a rank's threads."""
THREADS = published("docs/measurements.md: two threads have 387 of 2 x 201 GFLOP/s and 53 of 2 x 28 GB/s; more assumed")


@checked(frozen=True, config=STRICT)
class Engine:
    """Seconds per layer beyond the laws: `launch_s` if the host launches it, `replay_s` in a decode step.

    `decode`, `read` and `update` are factors on kernels in decoding, inference and training.
    """

    launch_s: Seconds
    replay_s: Seconds
    source: Source = measured("a file")
    decode: Factor = 1.0
    read: Factor = 1.0
    update: Factor = 1.0


PUBLISHED = Engine(0.50e-3, 0.15e-3, published("ReaL's generation with and without CUDA graphs (benchmarks/published)"))
OF_CPU = Engine(0.0, 0.0, assumed("a CPU launches nothing"))


@dataclass(frozen=True)
class Cluster:
    """`nodes` of `gpus_per_node` processors, numbered node by node; `between` is None if there is one node.

    `threads`: by number of cores, the speed of a rank with them over that of one core; `adapted`: the engine, if measured.
    """

    nodes: int
    gpus_per_node: int
    gpu: Gpu
    inside: Inside
    between: Between | None = None
    threads: Mapping[int, float] = field(default_factory=dict)
    adapted: Engine | None = None

    @property
    def engine(self) -> Engine:
        return self.adapted or (OF_CPU if self.gpu.on_cpu else PUBLISHED)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.gpus_per_node

    def sources(self) -> Iterator[tuple[str, Source]]:
        yield from ((f"gpu.{name}", source) for name, source in self.gpu.sources.items())
        yield "inside", self.inside.source
        if self.between is not None:
            yield "between", self.between.source
        yield "host", self.engine.source


def threaded(cluster: Cluster, ranks: int, threads_per_rank: int) -> Cluster:
    """Return the cluster as this number of ranks sees it: each has its threads' cores, and its part of the node's memory.

    `threads_per_rank` 0: the cores are divided among the ranks of a node. GPUs stay as they are.
    """
    gpu, cores = cluster.gpu, cluster.gpus_per_node
    share = cores // min(ranks, cores)
    if not gpu.on_cpu or share == 1:
        return cluster
    threads = min(threads_per_rank or share, share)
    known = [count for count in cluster.threads if count <= threads]
    gain, source = threads * KEPT ** log2(threads), THREADS
    if known:
        gain, source = cluster.threads[max(known)], measured("threads of the file that `measured` names")
    sources = {**gpu.sources, "threads": source} if threads > 1 else gpu.sources
    faster = replace(gpu, flops=gain * gpu.flops, bytes_per_s=gain * gpu.bytes_per_s, sources=sources)
    return replace(cluster, gpu=replace(faster, memory_bytes=share * gpu.memory_bytes))
