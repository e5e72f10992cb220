"""A cluster of equal nodes. Bus bandwidth as in nccl-tests: bytes on the wire per second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import log2
from typing import Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass as checked

Kind = Literal["measured", "published", "assumed", "given"]


@dataclass(frozen=True)
class Source:
    kind: Kind
    where: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


published, assumed, measured = partial(Source, "published"), partial(Source, "assumed"), partial(Source, "measured")
LAYERS = "microsoft/vidur, data/profiling/compute, commit 7d47513; fitted"
PEAKS = "stas00/ml-engineering, compute/accelerator"
MOST_POWER = 16.0
"""Above it the smooth maximum is within 4 % of the larger part, and powers of seconds leave the range of floats."""
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Share = Annotated[float, Strict(), Field(ge=1e-6, le=2)]
Seconds = Annotated[float, Strict(), Field(ge=0, le=60)]


@checked(frozen=True, config=STRICT)
class Efficiencies:
    """`elementwise`: fused norms, rotations, activation, sums; `plain`: one pass over large tensors."""

    compute: Share
    memory: Share
    fixed_s: Seconds
    power: Annotated[float, Strict(), Field(ge=1, le=MOST_POWER)]
    elementwise: Share
    elementwise_fixed_s: Seconds
    plain: Share
    attention: Share = 0.5


@dataclass(frozen=True)
class Gpu:
    """`on_cpu`: a CPU core, which launches nothing. `sources` by field."""

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: float
    efficiencies: Efficiencies
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False)
    on_cpu: bool = False


A100_LAWS = Efficiencies(0.74, 0.82, 20e-6, 1.4, 0.49, 10e-6, 0.85)
H100_LAWS = Efficiencies(0.76, 1.00, 25e-6, 1.3, 0.56, 10e-6, 0.96)
CPU_LAWS = Efficiencies(0.8, 0.8, 20e-6, 1.3, 0.5, 20e-6, 0.8)
ATTENTION = {"efficiencies.attention": assumed("half of the peak while prompts are read")}


def _sources(peaks: Source, memory: Source, laws: Source) -> Mapping[str, Source]:
    return {"flops": peaks, "bytes_per_s": peaks, "memory_bytes": memory, "efficiencies": laws} | ATTENTION


SHEET = published("NVIDIA's data sheet")
CORE = assumed("a core of a server; measure yours with benchmarks/machine.py")
GPUS: Mapping[str, Gpu] = {
    "a100-80": Gpu("a100-80", 312e12, 2.039e12, 80e9, A100_LAWS, _sources(SHEET, SHEET, published(LAYERS))),
    "h100": Gpu("h100", 989e12, 3.35e12, 80e9, H100_LAWS, _sources(published(PEAKS), SHEET, published(LAYERS))),
    "h200": Gpu(
        "h200", 989e12, 4.8e12, 141e9, H100_LAWS,
        _sources(published(PEAKS), SHEET, assumed("as an H100's: no layers measured on an H200 were found")),
    ),
    "cpu": Gpu(
        "cpu", 0.1e12, 10e9, 8e9, CPU_LAWS,
        _sources(CORE, CORE, assumed("no layers measured")), on_cpu=True,
    ),
}  # fmt: skip
"""`cpu` is one core."""


SWEEPS = "microsoft/vidur, data/profiling/network, commit 7d47513; fitted"


@checked(frozen=True, config=STRICT)
class Line:
    """`alpha_s`, plus bytes on the wire over `bytes_per_s`."""

    alpha_s: Seconds
    bytes_per_s: Annotated[float, Strict(), Field(ge=1e3, le=1e18)]

    def seconds(self, payload: float, factor: float) -> float:
        """Seconds of `payload` bytes that pass the wire `factor` times."""
        return self.alpha_s + factor * payload / self.bytes_per_s

    @property
    def peak(self) -> float:
        return self.bytes_per_s


@dataclass(frozen=True)
class Curve:
    """Bus bandwidth by payload, interpolated in logarithms and constant outside; at least `alpha_s`."""

    alpha_s: float
    payloads: tuple[float, ...]
    bytes_per_s: tuple[float, ...]

    def seconds(self, payload: float, factor: float) -> float:
        rate = np.exp(np.interp(np.log(max(payload, 1.0)), np.log(self.payloads), np.log(self.bytes_per_s)))
        return max(self.alpha_s, factor * payload / float(rate))

    @property
    def peak(self) -> float:
        return self.bytes_per_s[-1]


Law = Line | Curve


@dataclass(frozen=True)
class Inside:
    collective: Mapping[int, Law]
    send: Law
    source: Source = field(compare=False)

    def of_ranks(self, ranks: int) -> Law:
        """Law of the smallest measured group of at least `ranks`, else the largest."""
        return self.collective[min((n for n in self.collective if n >= ranks), default=max(self.collective))]


@dataclass(frozen=True)
class Between:
    alpha_s: float
    bytes_per_s: float
    nics: int
    source: Source = field(compare=False)

    @property
    def node_bytes_per_s(self) -> float:
        return self.nics * self.bytes_per_s


GB, US, MIB = 1e9, 1e-6, 2**20
H200_MIB = (1 / 32, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
H200_GB = (
    3.15, 39.93, 64.53, 107.16, 155.53, 219.89, 275.84, 346.51, 401.93, 436.15, 450.29, 463.58,
    469.17, 473.10, 477.45, 482.26,
)  # fmt: skip
"""Measured from 1 MiB; below, the table has the host's time, so 32 KiB has the source's 3.15 GB/s of queued calls."""
H200_CURVE = Curve(18 * US, tuple(size * MIB for size in H200_MIB), tuple(rate * GB for rate in H200_GB))
INSIDE: Mapping[str, Inside] = {
    "a100-80": Inside(
        {2: Line(35.8 * US, 158.4 * GB), 4: Line(28.7 * US, 153.9 * GB), 8: Line(39.0 * US, 151.9 * GB)},
        Line(13.2 * US, 285.8 * GB),
        published(SWEEPS),
    ),
    "h100": Inside(
        {2: Line(16.6 * US, 282.1 * GB), 4: Line(30.6 * US, 379.6 * GB), 8: Line(28.6 * US, 338.9 * GB)},
        Line(7.6 * US, 357.5 * GB),
        published(SWEEPS),
    ),
    "h200": Inside(
        {8: H200_CURVE},
        Line(7.6 * US, 357.5 * GB),
        published("stas00/ml-engineering, all-reduce of 8 H200, commit c53741b; fewer ranks as 8, messages as an H100's"),
    ),
    "cpu": Inside({8: Line(300 * US, 1 * GB)}, Line(150 * US, 1 * GB), assumed("gloo over loopback")),
}  # fmt: skip


Factor = Annotated[float, Strict(), Field(ge=0, le=1000)]
KEPT = 0.95
"""Share of both peaks kept per doubling of threads."""
THREADS = published("docs/measurements.md: two threads have 387 of 2 x 201 GFLOP/s and 53 of 2 x 28 GB/s; more assumed")


@checked(frozen=True, config=STRICT)
class Engine:
    """Seconds per layer beyond the laws: `launch_s` from the host, `replay_s` in a decode step. Others: factors on kernels."""

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
    """`threads`: speed of a rank by cores, relative to one; `adapted`: measured engine."""

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
    """Give each rank on CPUs its threads' cores and a share of memory. `threads_per_rank` 0: all cores."""
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
