"""One role in its layout on a cluster: seconds of a stage's forward, and of what passes between stages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from oppo_megatron.layout.flops import Shape, causal_pairs
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.clusters.sources import Source, assumed, published
from oppo_megatron.sim.laws.communication import Group, all_reduce_s, send_s
from oppo_megatron.sim.laws.layer import WIDTH, LayerLaw, LayerSizes


@dataclass(frozen=True)
class Host:
    """What a layer costs beyond the laws: `launch_s` where the host launches it; `replay_s` in a decode step."""

    launch_s: float
    replay_s: float
    source: Source


REAL_HOST = Host(0.50e-3, 0.15e-3, published("ReaL's generation with and without CUDA graphs; `oppo bench real`"))
NO_HOST = Host(0.0, 0.0, assumed("a processor launches nothing"))


def host_of(cluster: Cluster) -> Host:
    return NO_HOST if cluster.gpu.name == "cpu" else REAL_HOST


@dataclass(frozen=True)
class Tokens:
    """A micro-batch: `new` tokens, `pairs` of these with each other, `cached` positions read, `rows` of outputs."""

    new: float
    pairs: float
    cached: float
    rows: float

    @classmethod
    def prompts(cls, tokens: float, length: float, *, outputs: bool) -> Tokens:
        """Whole sequences of `length` tokens."""
        pairs = tokens / length * causal_pairs(0, round(length)) if length else 0.0
        return cls(tokens, pairs, 0.0, tokens if outputs else 0.0)

    @classmethod
    def step(cls, sequences: float, positions: float) -> Tokens:
        """A token of each sequence, behind `positions` of all together."""
        return cls(sequences, 0.0, positions, sequences)


@dataclass(frozen=True)
class LaidModel:
    """A role's model in a layout.  `sequence_parallel`: norms and sums are divided over the tensor ranks."""

    cluster: Cluster
    shape: Shape
    scalar: bool
    placement: RolePlacement
    sequence_parallel: bool = False

    @property
    def layers(self) -> int:
        """Of a stage."""
        return int(self.shape["num_hidden_layers"]) // self.placement.pp

    @cached_property
    def sizes(self) -> LayerSizes:
        return LayerSizes.of(self.shape, self.placement.tp)

    def step_s(self, stage: int, tokens: Tokens, *, captured: bool) -> float:
        """Seconds of a decode step of one micro-batch, captured as a CUDA graph or launched."""
        host = host_of(self.cluster)
        return self._forward_s(stage, tokens, host.replay_s + (0.0 if captured else host.launch_s))

    def forward_s(self, stage: int, tokens: Tokens) -> float:
        """Seconds of a stage's forward over one micro-batch of new tokens."""
        return self._forward_s(stage, tokens, host_of(self.cluster).launch_s)

    def _forward_s(self, stage: int, tokens: Tokens, host_s: float) -> float:
        """`host_s`: of a layer."""
        law = self._law
        layer = law.products_s(self.sizes, tokens.new)
        layer += law.elementwise_s(self.sizes, tokens.new, hidden_share=self._hidden_share)
        layer += law.attention_s(self.sizes, tokens.pairs) + law.cached_attention_s(self.sizes, tokens.cached)
        layer += 2 * all_reduce_s(
            self.cluster, self.tensor_group(stage), WIDTH * self.shape["hidden_size"] * tokens.new
        )
        return self.layers * (layer + host_s) + self.head_s(stage, tokens.rows)

    def attention_s(self, tokens: Tokens) -> float:
        """Of a stage's layers: the part that selective recomputation computes once more."""
        return self.layers * self._law.attention_s(self.sizes, tokens.pairs)

    def head_s(self, stage: int, rows: float) -> float:
        """Logits of the last stage of a language model."""
        if self.scalar or stage < self.placement.pp - 1 or rows <= 0:
            return 0.0
        return self._law.head_s(self.shape, self.placement.tp, rows)

    def hop_s(self, stage: int, tokens: float) -> float:
        """From one stage to the next: every tensor rank sends its hidden states."""
        if stage + 1 >= self.placement.pp:
            return 0.0
        payload = WIDTH * self.shape["hidden_size"] * tokens * self._hidden_share
        most = max(self._leaving(stage).values(), default=0)
        return send_s(self.cluster, payload, between=most > 0, beside=max(1, most))

    def tensor_group(self, stage: int) -> Group:
        return Group.of(self.cluster, self.placement.stage_ranks(0, stage), self._beside(self.placement.tp))

    def replica_group(self, stage: int) -> Group:
        """Ranks of the same stage and shard in every replica: gradients are summed over them."""
        ranks = [self.placement.rank(replica, stage, 0) for replica in range(self.placement.dp)]
        return Group.of(self.cluster, ranks, self._beside_replicas(stage))

    def _beside(self, size: int) -> int:
        return max(1, self.cluster.gpus_per_node // size)

    def _beside_replicas(self, stage: int) -> int:
        """Such groups that have ranks on the first one's node."""
        placement, node = self.placement, self.cluster.node_of(self.placement.rank(0, stage, 0))
        coords = [placement.coords(rank) for rank in placement.ranks if self.cluster.node_of(rank) == node]
        return len({(each.stage, each.shard) for each in coords if each is not None})

    def _leaving(self, stage: int) -> Counter[int]:
        """By node, ranks of the stage whose next rank is on another node."""
        placement, node_of = self.placement, self.cluster.node_of
        pairs = [
            (placement.rank(replica, stage, shard), placement.rank(replica, stage + 1, shard))
            for replica in range(placement.dp)
            for shard in range(placement.tp)
        ]
        return Counter(node_of(here) for here, there in pairs if node_of(here) != node_of(there))

    @property
    def _law(self) -> LayerLaw:
        return LayerLaw(self.cluster.gpu)

    @property
    def _hidden_share(self) -> float:
        return 1 / self.placement.tp if self.sequence_parallel else 1.0
