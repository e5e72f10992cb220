"""`cluster.yaml` into a `Cluster`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oppo_megatron.config.load import load_config
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.clusters.engine import Engine
from oppo_megatron.sim.clusters.gpus import ATTENTION, GPUS, Efficiencies, Gpu
from oppo_megatron.sim.clusters.links import GB, INSIDE, US, Between, Inside, Law, Line
from oppo_megatron.sim.clusters.measured import LineSection, MeasuredConfig, read_measured
from oppo_megatron.sim.clusters.schema import ClusterConfig, GpuSection
from oppo_megatron.sim.clusters.sources import Source, assumed, measured


def read_cluster(path: str | Path, overrides: Sequence[str] = ()) -> Cluster:
    """The cluster that a file describes.  A `measured` file is looked for beside it.  Raises ConfigError."""
    config = load_config(ClusterConfig, path, overrides)
    return build_cluster(config, Path(path).parent)


def build_cluster(config: ClusterConfig, folder: Path = Path()) -> Cluster:
    """Names and numbers into constants with their sources.  Raises ConfigError."""
    cluster = Cluster(config.nodes, config.gpus_per_node, _gpu(config), _inside(config), _between(config))
    return cluster if config.measured is None else _with_measured(cluster, read_measured(folder / config.measured))


def _given(key: str) -> Source:
    return Source("given", f"`{key}` of cluster.yaml")


def _gpu(config: ClusterConfig) -> Gpu:
    if not isinstance(config.gpu, GpuSection):
        return GPUS[config.gpu]
    numbers, like = config.gpu, GPUS[config.gpu.like]
    sources = {"flops": _given("gpu.tflops"), "bytes_per_s": _given("gpu.gb_per_s")}
    sources |= {"memory_bytes": _given("gpu.memory_gb"), "efficiencies": assumed(f"as a {like.name}'s")}
    return Gpu(
        f"{numbers.tflops:g} TFLOP/s", numbers.tflops * 1e12, numbers.gb_per_s * GB, numbers.memory_gb * 1e9,
        like.efficiencies, sources | ATTENTION, on_cpu=like.on_cpu,
    )  # fmt: skip


def _inside(config: ClusterConfig) -> Inside:
    if config.inside is not None:
        line = Line(config.inside.alpha_us * US, config.inside.gb_per_s * GB)
        return Inside({config.gpus_per_node: line}, line, _given("inside"))
    return INSIDE[config.gpu.like if isinstance(config.gpu, GpuSection) else config.gpu]


def _between(config: ClusterConfig) -> Between | None:
    if config.between is None:
        return None
    given = config.between
    return Between(given.alpha_us * US, given.gb_per_s * GB, given.nics or config.gpus_per_node, _given("between"))


def _with_measured(cluster: Cluster, file: MeasuredConfig) -> Cluster:
    gpu, inside, source = cluster.gpu, cluster.inside, measured(file.source)
    if file.efficiencies is not None:
        fitted = Efficiencies(**file.efficiencies.model_dump(), attention=gpu.efficiencies.attention)
        gpu = replace(gpu, efficiencies=fitted, sources={**gpu.sources, "efficiencies": source})
    if file.collective:
        laws: dict[int, Law] = {ranks: _line(line) for ranks, line in file.collective.items()}
        inside = replace(inside, collective=laws, source=source)
    if file.send is not None:
        inside = replace(inside, send=_line(file.send), source=source)
    engine = None if file.engine is None else Engine(**file.engine.model_dump(), source=source)
    return replace(cluster, gpu=gpu, inside=inside, threads=file.threads, adapted=engine)


def _line(section: LineSection) -> Line:
    return Line(section.alpha_s, section.bytes_per_s)
