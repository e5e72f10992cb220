"""Seconds of a phase of one role: inference, an update, the move of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from oppo_megatron.config.model import TrainingLayoutConfig
from oppo_megatron.layout.flops import Shape, head_linear, layer_linears
from oppo_megatron.layout.memory import stage_layers, stage_parameters
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.laws.communication import Group, Moves, all_reduce_s, scatter_s
from oppo_megatron.sim.laws.layer import WIDTH
from oppo_megatron.sim.pricing.model import LaidModel, Tokens

GRADIENT_WIDTH = 4
"""Gradients are summed in float32."""
ADAM_BYTES = 28
"""A parameter: main weight, two moments and gradient read, the first three written."""


@dataclass(frozen=True)
class Batch:
    """Sequences of `length` tokens each on average, `tokens` of a replica, at most `micro_batch_tokens` at once."""

    tokens: float
    length: float
    micro_batch_tokens: int

    @property
    def micro_batches(self) -> int:
        return max(1, ceil(self.tokens / max(self.micro_batch_tokens, self.length)))

    def micro_batch(self, *, outputs: bool) -> Tokens:
        return Tokens.prompts(self.tokens / self.micro_batches, self.length, outputs=outputs)


def inference_s(model: LaidModel, batch: Batch) -> float:
    """All micro-batches through all stages; messages are sent while the next one is computed."""
    tokens = batch.micro_batch(outputs=True)
    stages = [model.forward_s(stage, tokens) for stage in range(model.placement.pp)]
    hops = [model.hop_s(stage, tokens.new) for stage in range(model.placement.pp)]
    return sum(stages) + sum(hops) + (batch.micro_batches - 1) * max(*stages, *hops)


@dataclass(frozen=True)
class Update:
    """`optimizer_steps`, each over `batch` on every replica."""

    batch: Batch
    optimizer_steps: int
    train: TrainingLayoutConfig


def update_s(model: LaidModel, update: Update) -> float:
    """Forward and backward of all micro-batches, gradients over the replicas, and the optimizer."""
    placement, batch = model.placement, update.batch
    tokens = batch.micro_batch(outputs=True)
    stages = [_training_s(model, stage, tokens, update.train) for stage in range(placement.pp)]
    hops = [2 * model.hop_s(stage, tokens.new) for stage in range(placement.pp)]
    slowest = max(*stages, *hops)
    bubble = (sum(stages) - max(stages)) / update.train.vpp + sum(hops)
    exchange = max(_exchange_s(model, stage, update.train, stages[stage]) for stage in range(placement.pp))
    return update.optimizer_steps * (batch.micro_batches * slowest + bubble + exchange)


def _training_s(model: LaidModel, stage: int, tokens: Tokens, train: TrainingLayoutConfig) -> float:
    """A stage's forward, its backward of two forwards, and what is recomputed."""
    forward = model.forward_s(stage, tokens)
    again = {
        "none": 0.0,
        "selective": model.attention_s(tokens),
        "full": forward - model.head_s(stage, tokens.rows),
    }
    return 3 * forward + again[train.recompute]


def _exchange_s(model: LaidModel, stage: int, train: TrainingLayoutConfig, last_s: float) -> float:
    """What of an optimizer step's messages nothing hides, and its passes over the state.

    Overlapped, gradients are summed while the last micro-batch's backward, two thirds of `last_s`, goes on.
    """
    placement, gpu = model.placement, model.cluster.gpu
    held = stage_parameters(model.shape, placement.tp, placement.pp, stage, scalar=model.scalar)
    shards = placement.dp if train.distributed_optimizer else 1
    optimizer = held * ADAM_BYTES / shards / (gpu.efficiencies.plain * gpu.bytes_per_s)
    if placement.dp == 1:
        return optimizer
    group = model.replica_group(stage)
    reduced, gathered = _gradients_s(model.cluster, group, held, sharded=train.distributed_optimizer)
    hidden = 2 / 3 * last_s if train.overlap_grad_reduce else 0.0
    return optimizer + max(0.0, reduced - hidden) + gathered


def _gradients_s(cluster: Cluster, group: Group, held: int, *, sharded: bool) -> tuple[float, float]:
    """Seconds of summing gradients, and of gathering weights."""
    if not sharded:
        return all_reduce_s(cluster, group, GRADIENT_WIDTH * held), 0.0
    return scatter_s(cluster, group, GRADIENT_WIDTH * held), scatter_s(cluster, group, WIDTH * held)


@dataclass(frozen=True)
class Weights:
    """A model's weights over some ranks, in a layout with `vpp` virtual stages."""

    placement: RolePlacement
    vpp: int = 1


def reallocation_s(cluster: Cluster, shape: Shape, source: Weights, target: Weights, *, scalar: bool) -> float:
    """Seconds until every rank of `target` has what it did not hold in `source`.

    Pieces come from a replica on the receiver's node where there is one, else from the replica of the same number.
    """
    moves = Moves(cluster)
    holders = _holders(shape, source)
    sizes = {"layer": sum(linear.size for linear in layer_linears(shape))}
    sizes |= {"embedding": head_linear(shape, scalar=False).size, "head": head_linear(shape, scalar=scalar).size}
    for rank in target.placement.ranks:
        for (kind, _, shares), holding in _pieces(shape, source, target, rank, holders).items():
            if rank not in holding:
                num_bytes = WIDTH * sizes[kind] * float(shares)
                moves.add(_nearest(cluster, holding, rank), rank, num_bytes)
    return moves.seconds()


Piece = tuple[str, int, Fraction]
"""A kind of matrices, which layer, and the share of them."""


def _parts(shape: Shape, weights: Weights, stage: int) -> list[tuple[str, int]]:
    placement = weights.placement
    layers = [layer for span in stage_layers(shape, placement.pp, stage, weights.vpp) for layer in span]
    ends = [("embedding", 0)] if stage == 0 else []
    ends += [("head", 0)] if stage == placement.pp - 1 else []
    return [("layer", layer) for layer in layers] + ends


def _holders(shape: Shape, weights: Weights) -> dict[tuple[str, int], int]:
    """The stage of each part."""
    pp = weights.placement.pp
    return {part: stage for stage in range(pp) for part in _parts(shape, weights, stage)}


def _pieces(
    shape: Shape, source: Weights, target: Weights, rank: int, holders: dict[tuple[str, int], int]
) -> dict[Piece, list[int]]:
    """Of a rank of `target`, its pieces by the ranks of `source` that hold all of each."""
    coords, here, there = target.placement.coords(rank), target.placement, source.placement
    assert coords is not None
    low, high = Fraction(coords.shard, here.tp), Fraction(coords.shard + 1, here.tp)
    found: dict[Piece, list[int]] = {}
    for kind, layer in _parts(shape, target, coords.stage):
        stage = holders[kind, layer]
        for shard in range(there.tp):
            share = min(high, Fraction(shard + 1, there.tp)) - max(low, Fraction(shard, there.tp))
            if share > 0:
                ranks = [there.rank(replica, stage, shard) for replica in range(there.dp)]
                found[kind, layer * there.tp + shard, share] = ranks
    return found


def _nearest(cluster: Cluster, holding: Sequence[int], rank: int) -> int:
    node = cluster.node_of(rank)
    near = [holder for holder in holding if cluster.node_of(holder) == node]
    return near[rank % len(near)] if near else holding[rank % len(holding)]
