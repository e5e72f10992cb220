"""Seconds of a role's inference, update and move of weights."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product
from math import ceil

import numpy as np

from oppo_megatron.config.model import TrainingLayoutConfig
from oppo_megatron.layout.flops import Shape, head_linear, layer_linears
from oppo_megatron.layout.memory import stage_layers, stage_parameters
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.laws import WIDTH, Ints, Moves, scatter_s
from oppo_megatron.sim.pricing.model import LaidModel, Tokens

GRADIENT_WIDTH = 4
"""Float32."""
ADAM_BYTES = 28
"""Bytes per parameter: main weight, two moments and gradient read, the first three written."""


@dataclass(frozen=True)
class Batch:
    """A replica's `tokens` in sequences of mean `length`."""

    tokens: float
    length: float
    micro_batch_tokens: int

    @property
    def micro_batches(self) -> int:
        return max(1, ceil(self.tokens / max(self.micro_batch_tokens, self.length)))

    def micro_batch(self, *, outputs: bool) -> Tokens:
        return Tokens.prompts(self.tokens / self.micro_batches, self.length, outputs=outputs)


def inference_s(model: LaidModel, batch: Batch) -> float:
    """All micro-batches through all stages; messages overlap with the next one's computation."""
    tokens = batch.micro_batch(outputs=True)
    stages = [model.forward_s(stage, tokens) for stage in range(model.placement.pp)]
    hops = [model.hop_s(stage, tokens.new) for stage in range(model.placement.pp)]
    return sum(stages) + sum(hops) + (batch.micro_batches - 1) * max(*stages, *hops)


@dataclass(frozen=True)
class Update:
    batch: Batch
    optimizer_steps: int
    train: TrainingLayoutConfig


def update_s(model: LaidModel, update: Update) -> float:
    placement, batch = model.placement, update.batch
    tokens = batch.micro_batch(outputs=True)
    stages = [_training_s(model, stage, tokens, update.train) for stage in range(placement.pp)]
    hops = [2 * model.hop_s(stage, tokens.new) for stage in range(placement.pp)]
    slowest = max(*stages, *hops)
    bubble = (sum(stages) - max(stages)) / update.train.vpp + sum(hops)
    exchange = max(_exchange_s(model, stage, update.train, stages[stage]) for stage in range(placement.pp))
    return update.optimizer_steps * (batch.micro_batches * slowest + bubble + exchange)


def _training_s(model: LaidModel, stage: int, tokens: Tokens, train: TrainingLayoutConfig) -> float:
    """A stage's forward, a backward of two forwards, and recomputation."""
    forward = model.forward_s(stage, tokens, training=True)
    again = {
        "none": 0.0,
        "selective": model.attention_s(tokens),
        "full": forward - model.head_s(stage, tokens.rows),
    }
    return 3 * forward + again[train.recompute]


def _exchange_s(model: LaidModel, stage: int, train: TrainingLayoutConfig, last_s: float) -> float:
    """Exposed messages of an optimizer step, and its passes. Gradients overlap with the last backward (2/3 `last_s`)."""
    placement, gpu = model.placement, model.cluster.gpu
    held = stage_parameters(model.shape, placement.tp, placement.pp, stage, scalar=model.scalar)
    optimizer = held * ADAM_BYTES / placement.dp / (gpu.efficiencies.plain * gpu.bytes_per_s)
    if placement.dp == 1:
        return optimizer
    group = model.replica_groups[stage]
    reduced = scatter_s(model.cluster, group, GRADIENT_WIDTH * held)
    gathered = scatter_s(model.cluster, group, WIDTH * held)
    return optimizer + max(0.0, reduced - 2 / 3 * last_s) + gathered


@dataclass(frozen=True)
class Weights:
    placement: RolePlacement
    vpp: int = 1


def reallocation_s(cluster: Cluster, shape: Shape, source: Weights, target: Weights, *, scalar: bool) -> float:
    """Seconds until `target`'s ranks have all weights, from a replica on their node if there is one."""
    moves = Moves(cluster)
    sizes = {"layer": sum(linear.size for linear in layer_linears(shape))}
    sizes |= {"embedding": head_linear(shape, scalar=False).size, "head": head_linear(shape, scalar=scalar).size}
    here, there = target.placement, source.placement
    mine_of, theirs_of = _by_coordinates(here), _by_coordinates(there)
    parts, held = _parts(shape, target), _parts(shape, source)
    for (stage, own), (holder, other) in product(enumerate(parts), enumerate(held)):
        for kind, size in sizes.items():
            times = len(own[kind] & other[kind])
            if not times:
                continue
            for mine, theirs, share in _overlaps(here.tp, there.tp):
                holding, asking = theirs_of[holder, :, theirs], mine_of[stage, :, mine]
                place = np.minimum(np.searchsorted(holding, asking), len(holding) - 1)
                lacking = asking[holding[place] != asking]
                if len(lacking):
                    moves.add_all(_nearest(cluster, holding, lacking), lacking, WIDTH * size * float(share), times)
    return moves.seconds()


def _by_coordinates(placement: RolePlacement) -> Ints:
    """Ranks, [stage, replica, shard]."""
    return np.array(placement.ranks).reshape(placement.pp, placement.dp, placement.tp)


def _parts(shape: Shape, weights: Weights) -> list[dict[str, set[int]]]:
    pp = weights.placement.pp
    return [
        {
            "layer": {layer for span in stage_layers(shape, pp, stage, weights.vpp) for layer in span},
            "embedding": {0} if stage == 0 else set(),
            "head": {0} if stage == pp - 1 else set(),
        }
        for stage in range(pp)
    ]


@cache
def _overlaps(here: int, there: int) -> list[tuple[int, int, Fraction]]:
    """Pairs of shards that share part of a matrix, with its share."""
    found = []
    for mine, theirs in product(range(here), range(there)):
        share = min(Fraction(mine + 1, here), Fraction(theirs + 1, there)) - max(Fraction(mine, here), Fraction(theirs, there))
        if share > 0:
            found.append((mine, theirs, share))
    return found


def _nearest(cluster: Cluster, holding: Ints, ranks: Ints) -> Ints:
    """For each rank one of `holding` (ascending), on its node if possible."""
    nodes, holders = ranks // cluster.gpus_per_node, holding // cluster.gpus_per_node
    first, after = np.searchsorted(holders, nodes, "left"), np.searchsorted(holders, nodes, "right")
    near = after - first
    place: Ints = holding[np.where(near > 0, first + ranks % np.maximum(near, 1), ranks % len(holding))]
    return place
