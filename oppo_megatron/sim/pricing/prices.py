"""Seconds of inference, update and move of weights, without overlap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import product
from math import ceil
from statistics import fmean

import numpy as np

from oppo_megatron.config.derived import minibatch_rows, row_tokens
from oppo_megatron.config.model import TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.memory import expert_weights, stage_layers, stage_parameters
from oppo_megatron.layout.placements import (
    RolePlacement,
    has_own_training_weights,
    named_roles,
    role_placements,
    training_placements,
    world_size,
)
from oppo_megatron.layout.role_memory import SCALAR_ROLES, laid_out, sequences_and_slots
from oppo_megatron.layout.shape import Shape, causal_pairs, head_linear, layer_weights
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.sim.clusters.cluster import Cluster, threaded
from oppo_megatron.sim.laws import WIDTH, Ints, LayerLaw, Moves, scatter_s
from oppo_megatron.sim.pricing.model import Decoding, LaidModel, Tokens, Turns, decode_s, predicted_costs

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
        tokens = self.tokens / self.micro_batches
        pairs = tokens / self.length * causal_pairs(0, round(self.length)) if self.length else 0.0
        return Tokens(tokens, pairs, 0.0, tokens if outputs else 0.0)


def inference_s(model: LaidModel, batch: Batch) -> float:
    """Micro-batches through all stages; messages overlap with the next one's computation."""
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
    """A forward, a backward of two forwards, and recomputation."""
    placement, batch = model.placement, update.batch
    whole, stages = batch.micro_batch(outputs=True), []
    tokens = Tokens(*(each / placement.cp for each in vars(whole).values()))
    gathers = 2 + (update.train.recompute != "none")  # of keys and values, and once of their gradients
    passes = 4 + 2 * (update.train.recompute == "full")  # of pairs and experts' outputs, and of their gradients
    for stage in range(placement.pp):
        forward = model.forward_s(stage, tokens, training=True)
        again = {"none": 0.0, "selective": model.attention_s(tokens), "full": forward - model.head_s(stage, tokens.rows)}
        messages = gathers * model.context_s(stage, whole.new) + passes * model.experts_s(stage, tokens.new)
        stages.append(3 * forward + again[update.train.recompute] + messages)
    hops = [2 * model.hop_s(stage, tokens.new) for stage in range(placement.pp)]
    slowest = max(*stages, *hops)
    bubble = (sum(stages) - max(stages)) / update.train.vpp + sum(hops)
    exchange = max(_exchange_s(model, stage, stages[stage]) for stage in range(placement.pp))
    return update.optimizer_steps * (batch.micro_batches * slowest + bubble + exchange)


def _exchange_s(model: LaidModel, stage: int, last_s: float) -> float:
    """Exposed messages of an optimizer step, and its passes. Gradients overlap with the last backward (2/3 `last_s`)."""
    placement = model.placement
    held, whole = (
        stage_parameters(model.shape, placement.tp, placement.pp, stage, scalar=model.scalar, ep=ep) for ep in (placement.ep, 1)
    )
    optimizer = LayerLaw(model.cluster.gpu).plain_s(whole * ADAM_BYTES / placement.copies)
    if placement.copies == 1:
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
    """Seconds until `target`'s ranks have all weights, from a replica on their node if possible."""
    moves = Moves(cluster)
    embedding, head = (head_linear(shape, scalar=each).size for each in (False, scalar))
    experts = expert_weights(shape)
    sizes = {"layer": layer_weights(shape) - experts, "experts": experts, "embedding": embedding, "head": head}
    parts, held = _parts(shape, target), _parts(shape, source)
    for (stage, own), (holder, other) in product(enumerate(parts), enumerate(held)):
        for kind, size in sizes.items():
            times = len(own[kind] & other[kind])
            if not times or not size:
                continue
            mine_of, theirs_of = (_by_coordinates(each.placement, kind) for each in (target, source))
            for mine, theirs, share in _overlaps(mine_of.shape[2], theirs_of.shape[2]):
                holding, asking = theirs_of[holder, :, theirs], mine_of[stage, :, mine]
                place = np.minimum(np.searchsorted(holding, asking), len(holding) - 1)
                lacking = asking[holding[place] != asking]
                if len(lacking):
                    moves.add(_nearest(cluster, holding, lacking), lacking, WIDTH * size * float(share), times)
    return moves.seconds()


def _by_coordinates(placement: RolePlacement, kind: str) -> Ints:
    """Ranks, [stage, replica, share of the weights]."""
    return np.array(placement.ranks).reshape(placement.pp, -1, placement.tp * (placement.ep if kind == "experts" else 1))


def _parts(shape: Shape, weights: Weights) -> list[dict[str, set[int]]]:
    pp = weights.placement.pp
    return [
        {
            **dict.fromkeys(("layer", "experts"), {i for span in stage_layers(shape, pp, stage, weights.vpp) for i in span}),
            "embedding": {0} if stage == 0 else set(),
            "head": {0} if stage == pp - 1 else set(),
        }
        for stage in range(pp)
    ]


@cache
def _overlaps(here: int, there: int) -> list[tuple[int, int, Fraction]]:
    found = []
    for mine, theirs in product(range(here), range(there)):
        share = min(Fraction(mine + 1, here), Fraction(theirs + 1, there)) - max(Fraction(mine, here), Fraction(theirs, there))
        if share > 0:
            found.append((mine, theirs, share))
    return found


def _nearest(cluster: Cluster, holding: Ints, ranks: Ints) -> Ints:
    """One of `holding` (ascending) for each rank, on its node if possible."""
    nodes, holders = ranks // cluster.gpus_per_node, holding // cluster.gpus_per_node
    first, after = np.searchsorted(holders, nodes, "left"), np.searchsorted(holders, nodes, "right")
    near = after - first
    place: Ints = holding[np.where(near > 0, first + ranks % np.maximum(near, 1), ranks % len(holding))]
    return place


@dataclass(frozen=True)
class StepWork:
    config: TrainConfig
    decoding: Decoding

    @property
    def length(self) -> float:
        return self.decoding.prompt_tokens + fmean(self.decoding.lengths)

    def reading(self, model: LaidModel, *, prompts_only: bool = False) -> Batch:
        length = self.decoding.prompt_tokens if prompts_only else self.length
        share = -(-len(self.decoding.lengths) // model.placement.dp)
        return Batch(share * length, length, self.config.runtime.micro_batch_tokens)

    def turns(self, placement: RolePlacement) -> Turns:
        model, overlap = laid_out(self.config, "actor", placement, placement), self.config.overlap
        _, slots = sequences_and_slots(self.config, "actor", placement, model)
        asked, weaves = overlap.weave[0], overlap.intra and overlap.schedule in ("auto", "woven")
        micro_batches = asked if asked != "auto" else None if weaves else 1  # as `RoundPlanner` cuts rounds
        return Turns(max(1, slots), overlap.chunk_tokens, micro_batches)

    def update(self, model: LaidModel, train: TrainingLayoutConfig) -> Update:
        ppo, share = self.config.ppo, minibatch_rows(self.config) / model.placement.dp
        prompt = self.decoding.prompt_tokens
        tokens = share * row_tokens(self.config, prompt, self.length - prompt)
        batch = Batch(tokens, self.length, self.config.runtime.micro_batch_tokens)
        return Update(batch, ppo.epochs * ppo.minibatches, train)


def trained_model(serving: LaidModel, placement: RolePlacement, train: TrainingLayoutConfig) -> LaidModel:
    return replace(serving, placement=placement, sequence_parallel=train.sequence_parallel and placement.tp > 1)


def seen_by(config: TrainConfig, cluster: Cluster) -> Cluster:
    return threaded(cluster, world_size(config), config.runtime.threads_per_rank)


@dataclass(frozen=True)
class Prices:
    config: TrainConfig
    cluster: Cluster
    decoding: Decoding

    def __post_init__(self) -> None:
        ranks = world_size(self.config)
        if ranks > self.cluster.num_ranks:
            raise ConfigError(
                f"the configuration has {ranks} ranks, but the cluster {self.cluster.num_ranks} "
                f"({self.cluster.nodes} x {self.cluster.gpus_per_node}); add nodes, or take a smaller layout"
            )

    def models(self) -> dict[str, LaidModel]:
        placements = role_placements(self.config)
        return {
            name: LaidModel(self.cluster, read_hf_config(role), name in SCALAR_ROLES, placements[name])
            for name, role in named_roles(self.config).items()
        }

    def rows(self) -> dict[tuple[str, str], float]:
        """Phases: prompts, decode, score, update, weights (if they move)."""
        work, found = StepWork(self.config, self.decoding), dict[tuple[str, str], float]()
        for name, model in self.models().items():
            if name == "actor":
                found[name, "prompts"] = inference_s(model, work.reading(model, prompts_only=True))
                found[name, "decode"] = decode_s(model, self.decoding, work.turns(model.placement))
            else:
                found[name, "score"] = inference_s(model, work.reading(model))
        return found | self.updates()

    def updates(self) -> dict[tuple[str, str], float]:
        models, placements, found = self.models(), training_placements(self.config), dict[tuple[str, str], float]()
        work = StepWork(self.config, self.decoding)
        for name, role in self.config.trained.items():
            serving, train = models[name], role.train
            model = trained_model(serving, placements[name], train)
            found[name, "update"] = update_s(model, work.update(model, train))
            if has_own_training_weights(serving.placement, placements[name], train.vpp):
                trained, target = Weights(placements[name], train.vpp), Weights(serving.placement)
                found[name, "weights"] = reallocation_s(self.cluster, model.shape, trained, target, scalar=model.scalar)
        return found

    def costs(self) -> Costs:
        models = self.models()
        sequences = -(-len(self.decoding.lengths) // models["actor"].placement.dp)
        return predicted_costs(models, self.decoding, sequences, self.config.runtime.micro_batch_tokens)
