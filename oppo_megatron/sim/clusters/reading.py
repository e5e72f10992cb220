from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, Strict, ValidationError, model_validator

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.explain import explain
from oppo_megatron.config.load import load_config
from oppo_megatron.config.paths import missing_path
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.checks import MOST_RANKS
from oppo_megatron.nesting import read_json
from oppo_megatron.sim.clusters.cluster import (
    ATTENTION,
    GB,
    GPUS,
    INSIDE,
    US,
    Between,
    Cluster,
    Efficiencies,
    Engine,
    Gpu,
    Inside,
    Law,
    Line,
    Source,
    assumed,
    measured,
)

GpuName = Literal["a100-80", "h100", "h200", "cpu"]
GPUS_PER_NODE = 64
Rate = Annotated[float, Field(ge=1e-3, le=1e6)]
Micros = Annotated[float, Field(ge=0, le=1e6)]
"""GB/s or TFLOP/s, and microseconds; other values are errors of units."""


class GpuSection(Section):
    """A processor by numbers; a layer reaches the same shares of its peaks as on the processor that it is `like`."""

    memory_gb: Annotated[Rate, Unit("10^9 bytes"), Field(description="memory, in 10^9 bytes")]
    tflops: Annotated[Rate, Unit("TFLOP/s"), Field(description="peak of dense bfloat16 products")]
    gb_per_s: Annotated[Rate, Unit("GB/s"), Field(description="peak of reading its memory")]
    like: Annotated[GpuName, Field(description="whose measured layers say how much of the peaks is reached")] = "h100"


class InsideSection(Section):
    """Links within a node."""

    alpha_us: Annotated[Micros, Field(description="least time of a message")] = 20.0
    gb_per_s: Annotated[Rate, Unit("GB/s"), Field(description="bus bandwidth of an all-reduce in a node")]


class BetweenSection(Section):
    """The network between nodes."""

    alpha_us: Annotated[Micros, Field(description="least time of a message")] = 19.0
    gb_per_s: Annotated[Rate, Unit("GB/s"), Field(description="line rate of one NIC: 200 Gb/s are 25")]
    nics: Annotated[int | None, Unit("NICs per node"), Field(gt=0, le=1024, description="null: one per GPU")] = None


class ClusterConfig(Section):
    """`cluster.yaml`: equal nodes of equal processors, and their links."""

    nodes: Annotated[int, Unit("nodes"), Field(ge=1, le=MOST_RANKS, description="machines")] = 1
    gpus_per_node: Annotated[int, Unit("GPUs"), Field(ge=1, le=GPUS_PER_NODE, description="processors of each")] = 8
    gpu: Annotated[GpuName | GpuSection, Field(description="by name, or by numbers")]
    inside: Annotated[InsideSection | None, Field(description="null: the links of the named GPU")] = None
    between: Annotated[BetweenSection | None, Field(description="required for several nodes")] = None
    measured: Annotated[
        Path | None, Field(description="constants fitted by benchmarks/machine.py, in place of the published ones")
    ] = None

    @model_validator(mode="after")
    def _has_ranks_and_links(self) -> ClusterConfig:
        problems, per_node = [], self.gpus_per_node
        if (ranks := self.nodes * per_node) > MOST_RANKS:
            problems.append(
                f"nodes {self.nodes} x gpus_per_node {per_node} are {ranks} ranks, but a run has at most {MOST_RANKS}; "
                "lower one of them"
            )
        if self.nodes > 1 and self.between is None:
            problems.append(
                f"nodes is {self.nodes}, but nothing says how they are linked; add `between: {{gb_per_s: 50, nics: 8}}` "
                "(line rate of a NIC, NICs per node)"
            )
        if isinstance(self.gpu, GpuSection) and self.inside is None and per_node > 1:
            problems.append(
                f"gpu is given by numbers, and gpus_per_node is {per_node}, but their links are missing; "
                "add `inside: {gb_per_s: 300}` (bus bandwidth of an all-reduce within a node)"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


class MeasuredConfig(Section):
    """Fitted constants; null ones stay as published. `threads`: speed of a rank by cores, relative to one."""

    source: Annotated[str, Field(min_length=1)]
    efficiencies: Efficiencies | None = None
    collective: dict[Annotated[int, Field(ge=2)], Line] = Field(default_factory=dict)
    send: Line | None = None
    engine: Engine | None = None
    threads: dict[Annotated[int, Field(ge=1)], Annotated[float, Strict(), Field(ge=1e-3, le=1e6)]] = Field(default_factory=dict)


def _with_measured(cluster: Cluster, path: Path) -> Cluster:
    if not path.is_file():
        raise ConfigError(missing_path("`measured` of cluster.yaml", path))
    try:
        tree = read_json(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError(f"it holds {type(tree).__name__}, not a JSON object")
        file = MeasuredConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([f"{path}: {problem}" for problem in explain(MeasuredConfig, error)]) from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; name the measured.json that benchmarks/machine.py has written") from error
    gpu, inside, source = cluster.gpu, cluster.inside, measured(file.source)
    if file.efficiencies is not None:
        gpu = replace(gpu, efficiencies=file.efficiencies, sources={**gpu.sources, "efficiencies": source})
    if file.collective:
        laws: dict[int, Law] = dict(file.collective)
        inside = replace(inside, collective=laws, source=source)
    if file.send is not None:
        inside = replace(inside, send=file.send, source=source)
    engine = None if file.engine is None else replace(file.engine, source=source)
    return replace(cluster, gpu=gpu, inside=inside, threads=file.threads, adapted=engine)


def read_cluster(path: str | Path, overrides: Sequence[str] = ()) -> Cluster:
    """`measured` is relative to the file's folder. Raises ConfigError."""
    config = load_config(ClusterConfig, path, overrides)
    return build_cluster(config, Path(path).parent)


def build_cluster(config: ClusterConfig, folder: Path = Path()) -> Cluster:
    given, between = config.between, None
    if isinstance(config.gpu, GpuSection):
        numbers, like = config.gpu, GPUS[config.gpu.like]
        sources = {"flops": _given("gpu.tflops"), "bytes_per_s": _given("gpu.gb_per_s")}
        sources |= {"memory_bytes": _given("gpu.memory_gb"), "efficiencies": assumed(f"as a {like.name}'s")}
        gpu, inside = Gpu(
            f"{numbers.tflops:g} TFLOP/s", numbers.tflops * 1e12, numbers.gb_per_s * GB, numbers.memory_gb * 1e9,
            like.efficiencies, sources | ATTENTION, on_cpu=like.on_cpu,
        ), INSIDE[numbers.like]  # fmt: skip
    else:
        gpu, inside = GPUS[config.gpu], INSIDE[config.gpu]
    if config.inside is not None:
        line = Line(config.inside.alpha_us * US, config.inside.gb_per_s * GB)
        inside = Inside({config.gpus_per_node: line}, line, _given("inside"))
    if given is not None:
        between = Between(given.alpha_us * US, given.gb_per_s * GB, given.nics or config.gpus_per_node, _given("between"))
    cluster = Cluster(config.nodes, config.gpus_per_node, gpu, inside, between)
    return cluster if config.measured is None else _with_measured(cluster, folder / config.measured)


def _given(key: str) -> Source:
    return Source("given", f"`{key}` of cluster.yaml")
