"""The schema of `cluster.yaml`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.layout.checks import MOST_RANKS

GpuName = Literal["a100-80", "h100", "h200", "cpu"]
GPUS_PER_NODE = 64
Rate = Annotated[float, Field(ge=1e-3, le=1e6)]
Micros = Annotated[float, Field(ge=0, le=1e6)]
"""GB/s or TFLOP/s, and microseconds: whatever lies beyond is a slip of units."""


class GpuSection(Section):
    """A processor by numbers.  What a layer reaches of its peaks is as that of the named one which it is `like`."""

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
    nics: Annotated[int | None, Unit("NICs a node"), Field(gt=0, le=1024, description="null: one for each GPU")] = None


class ClusterConfig(Section):
    """`cluster.yaml`: equal nodes of equal processors, and their links."""

    nodes: Annotated[int, Unit("nodes"), Field(ge=1, le=MOST_RANKS, description="machines")] = 1
    gpus_per_node: Annotated[int, Unit("GPUs"), Field(ge=1, le=GPUS_PER_NODE, description="processors of each")] = 8
    gpu: Annotated[GpuName | GpuSection, Field(description="by name, or by numbers")]
    inside: Annotated[InsideSection | None, Field(description="null: those of the named GPU")] = None
    between: Annotated[BetweenSection | None, Field(description="needed where there are several nodes")] = None
    measured: Annotated[
        Path | None,
        Field(description="constants fitted by benchmarks/machine.py, in place of the published ones"),
    ] = None

    @model_validator(mode="after")
    def _has_ranks_and_links(self) -> ClusterConfig:
        if problems := list(cluster_problems(self)):
            raise ValueError("; ".join(problems))
        return self


def cluster_problems(config: ClusterConfig) -> Sequence[str]:
    """Too many ranks, and links that the cluster needs and lacks."""
    problems = []
    if (ranks := config.nodes * config.gpus_per_node) > MOST_RANKS:
        problems.append(
            f"nodes {config.nodes} x gpus_per_node {config.gpus_per_node} are {ranks} ranks, but a run has at most {MOST_RANKS}; "
            "lower one of them"
        )
    if config.nodes > 1 and config.between is None:
        problems.append(
            f"nodes is {config.nodes}, but nothing says how they are linked; add `between: {{gb_per_s: 50, nics: 8}}` "
            "(line rate of a NIC, NICs a node)"
        )
    if isinstance(config.gpu, GpuSection) and config.inside is None and config.gpus_per_node > 1:
        problems.append(
            f"gpu is given by numbers, and gpus_per_node is {config.gpus_per_node}, but nothing says how these are linked; "
            "add `inside: {gb_per_s: 300}` (bus bandwidth of an all-reduce within a node)"
        )
    return problems
