"""Seconds and bytes of each role and phase, without overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from oppo_megatron.config.derived import minibatch_rows
from oppo_megatron.config.model import TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.holdings import rank_memory, train_holdings
from oppo_megatron.layout.placements import (
    RolePlacement,
    has_own_training_weights,
    named_roles,
    role_placements,
    training_placements,
    world_size,
)
from oppo_megatron.layout.role_memory import SCALAR_ROLES, laid_out, sequences_and_slots
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.sim.clusters.cluster import Cluster, threaded
from oppo_megatron.sim.pricing.decoding import Decoding, Turns, decode_s, predicted_costs
from oppo_megatron.sim.pricing.model import LaidModel
from oppo_megatron.sim.pricing.phases import Batch, Update, Weights, inference_s, reallocation_s, update_s


@dataclass(frozen=True)
class Price:
    role: str
    phase: str
    layout: str
    seconds: float


@dataclass(frozen=True)
class StepWork:
    config: TrainConfig
    decoding: Decoding

    @property
    def length(self) -> float:
        """Mean tokens of a sequence with its prompt."""
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
        return Turns(max(1, slots), overlap.chunk.tokens, micro_batches)

    def update(self, model: LaidModel, train: TrainingLayoutConfig) -> Update:
        ppo, share = self.config.ppo, minibatch_rows(self.config) / model.placement.dp
        batch = Batch(share * self.length, self.length, self.config.runtime.micro_batch_tokens)
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

    @property
    def work(self) -> StepWork:
        return StepWork(self.config, self.decoding)

    def models(self) -> dict[str, LaidModel]:
        placements = role_placements(self.config)
        return {
            name: LaidModel(self.cluster, read_hf_config(role), name in SCALAR_ROLES, placements[name])
            for name, role in named_roles(self.config).items()
        }

    def rows(self) -> Iterator[Price]:
        models, work = self.models(), self.work
        for name, model in models.items():
            if name == "actor":
                yield _price(name, "prompts", model, inference_s(model, work.reading(model, prompts_only=True)))
                yield _price(name, "decode", model, decode_s(model, self.decoding, work.turns(model.placement)))
            else:
                yield _price(name, "score", model, inference_s(model, work.reading(model)))
        yield from self.updates()

    def costs(self) -> Costs:
        models = self.models()
        sequences = -(-len(self.decoding.lengths) // models["actor"].placement.dp)
        return predicted_costs(models, self.decoding, sequences, self.config.runtime.micro_batch_tokens)

    def fullest_gb(self) -> float:
        """As in `--dry-run`, in 10^9 bytes."""
        on_cpu = self.cluster.gpu.on_cpu
        held = rank_memory(train_holdings(self.config, on_cpu=on_cpu))
        return max(memory.total for memory in held.values()) / 1e9

    def updates(self) -> Iterator[Price]:
        models, placements, work = self.models(), training_placements(self.config), self.work
        for name, role in self.config.trained.items():
            serving, train = models[name], role.train
            model = trained_model(serving, placements[name], train)
            yield _price(name, "update", model, update_s(model, work.update(model, train)))
            if has_own_training_weights(serving.placement, placements[name], train.vpp):
                trained, target = Weights(placements[name], train.vpp), Weights(serving.placement)
                seconds = reallocation_s(self.cluster, model.shape, trained, target, scalar=model.scalar)
                yield _price(name, "weights", serving, seconds)


def total_s(prices: Sequence[Price]) -> float:
    return sum(price.seconds for price in prices)


def _price(role: str, phase: str, model: LaidModel, seconds: float) -> Price:
    placement = model.placement
    return Price(role, phase, f"tp {placement.tp} x pp {placement.pp} x dp {placement.dp}", seconds)
