"""A cluster: equal nodes of equal processors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from oppo_megatron.sim.clusters.engine import OF_CPU, PUBLISHED, Engine
from oppo_megatron.sim.clusters.gpus import Gpu
from oppo_megatron.sim.clusters.links import Between, Inside
from oppo_megatron.sim.clusters.sources import Source


@dataclass(frozen=True)
class Cluster:
    """`between` is None where there is one node.  Ranks are numbered node by node.

    `threads`: of cores, how many times as fast a rank with so many of them is as one with a single one.  `adapted`: what the
    engine takes beyond the laws, where it was measured.
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
        """The source of every constant, by name."""
        yield from ((f"gpu.{name}", source) for name, source in self.gpu.sources.items())
        yield "inside", self.inside.source
        if self.between is not None:
            yield "between", self.between.source
        yield "host", self.engine.source
