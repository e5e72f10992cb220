"""Seconds of a role's stages and messages, and of decoding a batch; cost lines for schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from oppo_megatron.columns import Ints
from oppo_megatron.layout.experts import experts_of
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.layout.shape import Shape, head_dim, num_kv_heads
from oppo_megatron.schedule.weaving.costs import Costs, Linear
from oppo_megatron.schedule.weaving.cut import Work, choose_cut, predict_s
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.laws import WIDTH, Group, LayerLaw, LayerSizes, all_reduce_s, scatter_s, send_s


@dataclass(frozen=True)
class Tokens:
    """`new` tokens, attending `pairs`, `cached` positions read, output `rows`."""

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

    def context_s(self, stage: int, tokens: float) -> float:
        """Seconds to gather keys and values of `tokens` over the ranks that share sequences."""
        size, per_node = self.placement.cp, self.cluster.gpus_per_node
        if size == 1:
            return 0.0
        group = Group.of(self.cluster, [self.placement.rank(copy, stage, 0) for copy in range(size)], max(1, per_node // size))
        numbers = 2 * num_kv_heads(self.shape) * head_dim(self.shape) / self.placement.tp
        return self.layers * scatter_s(self.cluster, group, WIDTH * numbers * tokens)

    def experts_s(self, stage: int, tokens: float) -> float:
        """Seconds to pass all pairs of `tokens` and experts to the replicas that hold the experts."""
        size, per_node, experts = self.placement.ep, self.cluster.gpus_per_node, experts_of(self.shape)
        if size == 1 or experts is None:
            return 0.0
        group = Group.of(self.cluster, [self.placement.rank(copy, stage, 0) for copy in range(size)], max(1, per_node // size))
        numbers = experts.active * self.shape["hidden_size"] / self.placement.tp
        return self.layers * scatter_s(self.cluster, group, WIDTH * numbers * tokens)

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
            found.append(Group(self.placement.copies, len(set(stage[:, 0].tolist())), int(sharing)))
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
        ranks = np.array(placement.ranks, dtype=np.int64).reshape(placement.pp, placement.copies, placement.tp)
        return ranks // self.cluster.gpus_per_node

    @property
    def _law(self) -> LayerLaw:
        return LayerLaw(self.cluster.gpu)

    @property
    def _hidden_share(self) -> float:
        return 1 / self.placement.tp if self.sequence_parallel else 1.0


BLOCKS = 32
"""Intervals of decoding with constant sequences and position."""
SAMPLED_WIDTH = 4
"""Bytes of a sampled logit."""
PASSES = 6
"""Passes over logits per draw: temperature, softmax, cumulative sums."""
DRAWS = 2
"""Messages per draw: shards' masses, and the token (`engine/sampler.py`)."""


@dataclass(frozen=True)
class Decoding:
    prompt_tokens: int
    lengths: Sequence[int]
    captured: bool = True


@dataclass(frozen=True)
class Turns:
    """`slots` sequences at once, admitted at rounds of `chunk` steps. `micro_batches` None: the fastest number."""

    slots: int
    chunk: int = 1
    micro_batches: int | None = None

    def starts(self, lengths: Ints) -> Ints:
        """Decode step at which each sequence gets a slot."""
        left = lengths[: self.slots].tolist()
        heapify(left)
        starts = np.zeros_like(lengths)
        for number in range(self.slots, len(lengths)):
            starts[number] = -(-left[0] // self.chunk) * self.chunk
            heapreplace(left, int(starts[number] + lengths[number]))
        return starts


def decode_s(actor: LaidModel, decoding: Decoding, turns: Turns) -> float:
    """Seconds of the slowest (first) replica, without prompts. Responses are dealt longest first."""
    lengths = np.array(sorted(decoding.lengths, reverse=True)[:: actor.placement.dp])
    lengths = np.random.default_rng(0).permutation(lengths)  # sequences that wait for a slot have any length
    starts = turns.starts(lengths)
    ends = starts + lengths
    edges = np.unique(np.linspace(0, int(ends.max()), BLOCKS + 1).astype(int))
    total = 0.0
    for begin, end in zip(edges.tolist(), edges[1:].tolist(), strict=False):
        first, last = np.maximum(starts, begin), np.minimum(ends, end)
        steps = np.maximum(last - first, 0)
        sequences = max(1, int(np.rint(steps.sum() / (end - begin))))
        position = (steps * ((first + last) / 2 - starts)).sum() / max(1, steps.sum())
        costs = decode_costs(actor, sequences, decoding.prompt_tokens + position, captured=decoding.captured)
        work = Work(sequences, end - begin, actor.placement.pp, {})
        cut = choose_cut(work, costs, sequences, micro_batches=turns.micro_batches, prefill_tokens=sequences)
        total += predict_s(work, cut, costs)
    return total


def decode_costs(actor: LaidModel, sequences: int, position: float, *, captured: bool) -> Costs:
    pp = actor.placement.pp
    few = max(1, sequences // (2 * pp))

    def step(stage: int, size: int) -> float:
        return actor.step_s(stage, Tokens.step(size, size * position), captured=captured)

    decode = tuple(line_through(few, step(stage, few), sequences, step(stage, sequences)) for stage in range(pp))
    draw = PASSES * SAMPLED_WIDTH * actor.shape["vocab_size"] / actor.placement.tp / actor.cluster.gpu.bytes_per_s
    messages = DRAWS * all_reduce_s(actor.cluster, actor.tensor_groups[pp - 1], SAMPLED_WIDTH)
    if pp == 1:
        message_s = send_s(actor.cluster, WIDTH * actor.shape["hidden_size"] * sequences, between=False)
    else:
        message_s = max(actor.hop_s(stage, sequences / pp) for stage in range(pp - 1)) + actor.cluster.engine.replay_s
    return Costs(decode, Linear(messages, draw), message_s=message_s)


def predicted_costs(models: Mapping[str, LaidModel], decoding: Decoding, sequences: int, prefill_tokens: int) -> Costs:
    position = decoding.prompt_tokens + sum(decoding.lengths) / len(decoding.lengths) / 2
    actor = models["actor"]
    decode = decode_costs(actor, sequences, position, captured=decoding.captured)
    few, score_s = max(1, prefill_tokens // 8), 0.0  # seconds per row, without reading the head's weights

    def prefill_s(model: LaidModel, stage: int, tokens: int) -> float:
        return model.forward_s(stage, Tokens(tokens, tokens * position, 0.0, 0.0))

    prefill = dict[str, tuple[Linear, ...]]()
    for role, model in models.items():
        stages = range(model.placement.pp)
        ends = [(prefill_s(model, stage, few), prefill_s(model, stage, prefill_tokens)) for stage in stages]
        prefill[role] = tuple(line_through(few, few_s, prefill_tokens, many_s) for few_s, many_s in ends)
        score_s = max(score_s, (model.head_s(stages[-1], 4096) - model.head_s(stages[-1], 2048)) / 2048)
    return Costs(decode.decode, decode.sample, prefill, score=Linear(0.0, score_s), message_s=decode.message_s)


def line_through(few: float, few_s: float, many: float, many_s: float) -> Linear:
    """Line that does not fall; constant for equal sizes."""
    each = max(0.0, (many_s - few_s) / (many - few)) if many > few else 0.0
    return Linear(max(0.0, few_s - few * each), each)
