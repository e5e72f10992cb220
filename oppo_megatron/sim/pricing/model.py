"""Seconds of a role's stages and of messages between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.layout.shape import Shape
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.laws import WIDTH, Group, LayerLaw, LayerSizes, all_reduce_s, send_s


@dataclass(frozen=True)
class Tokens:
    """A micro-batch: `new` tokens, attending `pairs`, `cached` positions read, output `rows`."""

    new: float
    pairs: float
    cached: float
    rows: float

    @classmethod
    def step(cls, sequences: float, positions: float) -> Tokens:
        return cls(sequences, 0.0, positions, sequences)


@dataclass(frozen=True)
class LaidModel:
    """`sequence_parallel` divides norms and sums over the tensor ranks."""

    cluster: Cluster
    shape: Shape
    scalar: bool
    placement: RolePlacement
    sequence_parallel: bool = False
    _forwards: dict[tuple[int, Tokens, float, float], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def layers(self) -> int:
        return int(self.shape["num_hidden_layers"]) // self.placement.pp

    @cached_property
    def sizes(self) -> LayerSizes:
        return LayerSizes.of(self.shape, self.placement.tp)

    def step_s(self, stage: int, tokens: Tokens, *, captured: bool) -> float:
        engine = self.cluster.engine
        return self._forward_s(stage, tokens, engine.replay_s + (0.0 if captured else engine.launch_s), engine.decode)

    def forward_s(self, stage: int, tokens: Tokens, *, training: bool = False) -> float:
        engine = self.cluster.engine
        return self._forward_s(stage, tokens, engine.launch_s, engine.update if training else engine.read)

    def _forward_s(self, stage: int, tokens: Tokens, host_s: float, factor: float) -> float:
        key, law = (stage, tokens, host_s, factor), self._law
        if (known := self._forwards.get(key)) is not None:
            return known
        kernels = law.products_s(self.sizes, tokens.new)
        kernels += law.elementwise_s(self.sizes, tokens.new, hidden_share=self._hidden_share)
        kernels += law.attention_s(self.sizes, tokens.pairs) + law.cached_attention_s(self.sizes, tokens.cached)
        payload = WIDTH * self.shape["hidden_size"] * tokens.new
        messages = 2 * self.layers + (stage == 0)  # of products of rows, two a layer, and of the embedding
        own = factor * (self.layers * kernels + self.head_s(stage, tokens.rows))
        messages_s = messages * all_reduce_s(self.cluster, self.tensor_groups[stage], payload)
        seconds = self._forwards[key] = own + messages_s + self.layers * host_s
        return seconds

    def attention_s(self, tokens: Tokens) -> float:
        return self.layers * self._law.attention_s(self.sizes, tokens.pairs)

    def head_s(self, stage: int, rows: float) -> float:
        if self.scalar or stage < self.placement.pp - 1 or rows <= 0:
            return 0.0
        return self._law.head_s(self.shape, self.placement.tp, rows)

    def hop_s(self, stage: int, tokens: float) -> float:
        if stage + 1 >= self.placement.pp:
            return 0.0
        payload = WIDTH * self.shape["hidden_size"] * tokens * self._hidden_share
        most = self._leaving[stage]
        return send_s(self.cluster, payload, between=most > 0, sharing=max(1, most))

    @cached_property
    def tensor_groups(self) -> tuple[Group, ...]:
        placement, sharing = self.placement, max(1, self.cluster.gpus_per_node // self.placement.tp)
        return tuple(Group.of(self.cluster, placement.stage_ranks(0, stage), sharing) for stage in range(placement.pp))

    @cached_property
    def replica_groups(self) -> tuple[Group, ...]:
        """A stage's ranks in all replicas; `sharing`: such groups on the first one's node."""
        found = []
        for stage in self._nodes:
            sharing = (self._nodes == stage[0, 0]).any(axis=1).sum()
            found.append(Group(self.placement.dp, len(set(stage[:, 0].tolist())), int(sharing)))
        return tuple(found)

    @cached_property
    def _leaving(self) -> tuple[int, ...]:
        found = []
        for here, there in zip(self._nodes, self._nodes[1:], strict=False):
            leaving = here[here != there]
            found.append(int(np.unique(leaving, return_counts=True)[1].max()) if leaving.size else 0)
        return (*found, 0)

    @cached_property
    def _nodes(self) -> npt.NDArray[np.int64]:
        """Node of each rank, [stage, replica, shard]."""
        placement = self.placement
        ranks = np.array(placement.ranks, dtype=np.int64).reshape(placement.pp, placement.dp, placement.tp)
        return ranks // self.cluster.gpus_per_node

    @property
    def _law(self) -> LayerLaw:
        return LayerLaw(self.cluster.gpu)

    @property
    def _hidden_share(self) -> float:
        return 1 / self.placement.tp if self.sequence_parallel else 1.0
