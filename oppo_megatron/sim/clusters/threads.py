"""Cores that ranks share out among their threads, where a run has fewer ranks than a node has cores."""

from __future__ import annotations

from dataclasses import replace
from math import log2

from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.clusters.sources import Source, measured, published

KEPT = 0.95
"""Of both peaks by each doubling of a rank's threads."""
THREADS = published(
    "docs/measurements.md: two threads have 387 of 2 x 201 GFLOP/s and 53 of 2 x 28 GB/s; more assumed"
)


def threaded(cluster: Cluster, ranks: int, threads_per_rank: int) -> Cluster:
    """The cluster as so many ranks see it: each has its threads' cores, and its part of the node's memory.

    `threads_per_rank` 0: the cores are divided among the ranks of a node (`runtime.threads_per_rank`).  GPUs stay as they are.
    """
    gpu, cores = cluster.gpu, cluster.gpus_per_node
    share = cores // min(ranks, cores)
    if not gpu.on_cpu or share == 1:
        return cluster
    threads = min(threads_per_rank or share, share)
    gain, source = _gain(cluster, threads)
    sources = {**gpu.sources, "threads": source} if threads > 1 else gpu.sources
    gpu = replace(gpu, flops=gain * gpu.flops, bytes_per_s=gain * gpu.bytes_per_s, sources=sources)
    return replace(cluster, gpu=replace(gpu, memory_bytes=share * gpu.memory_bytes))


def _gain(cluster: Cluster, threads: int) -> tuple[float, Source]:
    """How many times as fast so many cores are as one."""
    counts = [count for count in cluster.threads if count <= threads]
    if counts:
        return cluster.threads[max(counts)], measured("threads of the file that `measured` names")
    return threads * KEPT ** log2(threads), THREADS
