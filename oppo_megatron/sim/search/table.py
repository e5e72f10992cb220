"""Prices of a configuration's roles on a cluster, each layout over each number of ranks once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from math import lcm
from typing import Literal, NamedTuple

from oppo_megatron.config.derived import members, minibatch_parts, most_sequences
from oppo_megatron.config.model import RoleConfig, TrainedRoleConfig, TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout.checks import serving_problems
from oppo_megatron.layout.layouts import Sizes, fills_shards, layouts_of, vocab_rows
from oppo_megatron.layout.memory import Shape
from oppo_megatron.layout.placements import RolePlacement, has_own_training_weights, named_roles
from oppo_megatron.layout.role_memory import SCALAR_ROLES, laid_out, served_stages, stage_memory, trained_stages
from oppo_megatron.layout.shape import model_limits
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.sim.clusters.cluster import Cluster
from oppo_megatron.sim.events.dataflow import nanoseconds
from oppo_megatron.sim.pricing.decoding import Decoding, decode_s
from oppo_megatron.sim.pricing.model import LaidModel
from oppo_megatron.sim.pricing.phases import Weights, inference_s, reallocation_s, update_s
from oppo_megatron.sim.pricing.prices import StepWork, trained_model
from oppo_megatron.sim.search.options import Option, Profile, undominated, with_weights
from oppo_megatron.sim.search.scales import Scales
from oppo_megatron.sim.search.steady import Steady
from oppo_megatron.sim.search.step import Times

MOST_STAGES = 8
VIRTUAL = (1, 2, 4)
"""Virtual stages a rank that are tried."""
RECOMPUTED: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")


class _Priced(NamedTuple):
    """Layouts of a role over so many ranks, with nanoseconds of serving and of the update."""

    servings: list[tuple[Sizes, int]]
    trainings: list[tuple[TrainingLayoutConfig, int]]


@dataclass(frozen=True)
class PriceTable:
    """All options of a configuration's roles.  `budget`: bytes of a rank that a plan may fill; `steady`: what a step decodes and
    reads, where `decoding` are the responses that it trains.

    Prices depend on how many ranks a role has, not on which: sets are parts of a node, or whole nodes, and nodes are alike.
    """

    config: TrainConfig
    cluster: Cluster
    decoding: Decoding
    steady: Steady
    budget: int
    scales: Scales = Scales()
    _fronts: dict[tuple[str, int], list[Option]] = field(default_factory=dict)
    _moves: dict[tuple[str, Sizes, Sizes], int] = field(default_factory=dict)
    _prices: dict[tuple[str, int], _Priced] = field(default_factory=dict)
    _decoded: dict[Sizes, float] = field(default_factory=dict)

    def with_config(self, config: TrainConfig) -> PriceTable:
        """For a configuration with other micro-batches, which neither decoding nor moves of weights have."""
        return replace(self, config=config, _fronts={}, _prices={})

    @cached_property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._settings)

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: read_hf_config(role) for name, role in self._settings.items()}

    @property
    def on_cpu(self) -> bool:
        return self.cluster.gpu.on_cpu

    def front(self, role: str, size: int) -> list[Option]:
        """The options that can be part of a best plan, fastest first."""
        key = (role, size)
        if key not in self._fronts:
            self._fronts[key] = undominated(self.options(role, size), lambda each: self.weigh(role, each), self.budget)
        return self._fronts[key]

    def least(self, role: str, size: int) -> Times | None:
        """No option over so many ranks has a shorter phase; None where there is no option."""
        priced = self._priced(role, size)
        if not priced.servings or (self._is_trained(role) and not priced.trainings):
            return None
        updates = [update_ns for _, update_ns in priced.trainings]
        return Times(min(serving_ns for _, serving_ns in priced.servings), min(updates, default=0))

    def options(self, role: str, size: int) -> Iterator[Option]:
        """All that the checks admit, moves of weights not yet priced."""
        numbers, priced = count(), self._priced(role, size)
        if not self._is_trained(role):
            for serving, serving_ns in priced.servings:
                memory = stage_memory(self.config, role, _over(serving), None, None, on_cpu=self.on_cpu)
                yield Option(next(numbers), serving, None, Times(serving_ns), Profile.of(memory.served))
            return
        memories = _Memories(self, role)
        for serving, serving_ns in priced.servings:
            for train, update_ns in priced.trainings:
                number = next(numbers)
                if _rows_are_shared(self.shapes[role], serving, _sizes(train)):
                    profile = memories.profile(serving, train)
                    yield Option(number, serving, train, Times(serving_ns, update_ns), profile)

    def again(self, role: str, option: Option) -> Option:
        """The same layouts by this table's prices."""
        serving_ns = self._serving_ns(role, option.serving)
        if option.train is None:
            memory = stage_memory(self.config, role, _over(option.serving), None, None, on_cpu=self.on_cpu)
            return replace(option, times=Times(serving_ns), profile=Profile.of(memory.served))
        times = Times(serving_ns, self._update_ns(role, option.train), option.times.weights)
        return replace(option, times=times, profile=_Memories(self, role).profile(option.serving, option.train))

    def _priced(self, role: str, size: int) -> _Priced:
        key = (role, size)
        if key not in self._prices:
            settings = self._settings[role]
            servings = [(sizes, self._serving_ns(role, sizes)) for sizes in self._servings(role, size)]
            trains = self._trainings(role, size, settings.train) if isinstance(settings, TrainedRoleConfig) else ()
            self._prices[key] = _Priced(servings, [(train, self._update_ns(role, train)) for train in trains])
        return self._prices[key]

    def _is_trained(self, role: str) -> bool:
        return isinstance(self._settings[role], TrainedRoleConfig)

    @cached_property
    def _settings(self) -> Mapping[str, RoleConfig]:
        return named_roles(self.config)

    def weigh(self, role: str, option: Option) -> Option:
        """With the seconds of its move of weights."""
        if option.train is None or option.training is None:
            return option
        serving, training = _over(option.serving), _over(option.training)
        if not has_own_training_weights(serving, training, option.train.vpp):
            return option
        key = (role, option.serving, option.training)
        if key not in self._moves:
            source, target = Weights(training, option.train.vpp), Weights(serving)
            seconds = reallocation_s(self.cluster, self.shapes[role], source, target, scalar=role in SCALAR_ROLES)
            self._moves[key] = nanoseconds(seconds * self.scales.weights)
        return with_weights(option, self._moves[key])

    def _servings(self, role: str, size: int) -> Iterator[Sizes]:
        limits = replace(
            model_limits(self.shapes[role]), sequences=most_sequences(self.config) // members(self.config).size
        )
        for sizes in layouts_of(size, limits):
            if self._is_tried(sizes) and not serving_problems(self.config, role, _over(sizes), self.shapes[role]):
                yield sizes

    def _trainings(self, role: str, size: int, own: TrainingLayoutConfig) -> Iterator[TrainingLayoutConfig]:
        limits = model_limits(self.shapes[role], minibatch_parts(self.config))
        for sizes in layouts_of(size, limits, interleaved=True):
            if not self._is_tried(sizes):
                continue
            # Norms and sums divided over tensor ranks take less time and less memory; gloo has no such collectives.
            sequence_parallel = sizes.tp > 1 and (own.sequence_parallel or not self.on_cpu)
            for recompute in RECOMPUTED:
                yield own.model_copy(
                    update=sizes._asdict() | {"sequence_parallel": sequence_parallel, "recompute": recompute}
                )

    def _is_tried(self, sizes: Sizes) -> bool:
        """Tensor ranks within a node, and no more stages than the role has nodes, or 8 (as ReaL has it)."""
        per_node = self.cluster.gpus_per_node
        return (
            sizes.tp <= per_node and sizes.pp <= max(MOST_STAGES, sizes.num_ranks // per_node) and sizes.vpp in VIRTUAL
        )

    def _serving_ns(self, role: str, sizes: Sizes) -> int:
        model, work = self._model(role, sizes), self._work
        batch = work.reading(model, prompts_only=role == "actor")
        seconds = inference_s(model, replace(batch, tokens=batch.tokens * self.steady.reads.get(role, 1.0)))
        if role == "actor":
            if sizes not in self._decoded:
                self._decoded[sizes] = decode_s(model, self.steady.decoding, work.turns(model.placement))
            seconds += self._decoded[sizes]
        return nanoseconds(seconds * self.scales.serving.get(role, 1.0))

    def _update_ns(self, role: str, train: TrainingLayoutConfig) -> int:
        sizes = _sizes(train)
        model = trained_model(self._model(role, sizes), _over(sizes), train)
        seconds = update_s(model, self._work.update(model, train))
        return nanoseconds(seconds * self.scales.update.get(role, 1.0))

    def _model(self, role: str, sizes: Sizes) -> LaidModel:
        return LaidModel(self.cluster, self.shapes[role], role in SCALAR_ROLES, _over(sizes))

    @property
    def _work(self) -> StepWork:
        return StepWork(self.config, self.decoding)


@dataclass(frozen=True)
class _Memories:
    """Memory of a trained role, each layout of serving and of training once for each number of rows that the vocabulary is
    padded to."""

    table: PriceTable
    role: str
    served: dict[tuple[Sizes, int], Profile] = field(default_factory=dict)
    trained: dict[tuple[Sizes, str, int], Profile] = field(default_factory=dict)

    def profile(self, serving: Sizes, train: TrainingLayoutConfig) -> Profile:
        config, on_cpu = self.table.config, self.table.on_cpu
        training = _sizes(train)
        placed, trained = _over(serving), _over(training)
        if not has_own_training_weights(placed, trained, train.vpp):
            return Profile.of(stage_memory(config, self.role, placed, trained, train, on_cpu=on_cpu).both)
        rows = _padded_rows(self.table.shapes[self.role], serving, training)
        serves, trains = (serving, rows), (training, train.recompute, rows)
        if serves not in self.served or trains not in self.trained:
            model = laid_out(config, self.role, placed, trained)
            if serves not in self.served:
                self.served[serves] = Profile.of(served_stages(config, self.role, placed, model, on_cpu=on_cpu))
            if trains not in self.trained:
                self.trained[trains] = Profile.of(trained_stages(config, trained, model, train, on_cpu=on_cpu))
        return self.served[serves].beside(self.trained[trains])


def _sizes(train: TrainingLayoutConfig) -> Sizes:
    assert train.tp and train.pp and train.dp, "the table writes all sizes down"
    return Sizes(train.tp, train.pp, train.dp, train.vpp)


def _over(sizes: Sizes) -> RolePlacement:
    return RolePlacement(tuple(range(sizes.num_ranks)), sizes.tp, sizes.pp, sizes.dp)


def _padded_rows(shape: Shape, serving: Sizes, training: Sizes) -> int:
    """Rows of a vocabulary that the tensor ranks of both layouts divide."""
    common = lcm(serving.tp, training.tp)
    return vocab_rows(shape["vocab_size"], common) * common


def _rows_are_shared(shape: Shape, serving: Sizes, training: Sizes) -> bool:
    """Whether no tensor rank is left without a token where weights move between both."""
    common = lcm(serving.tp, training.tp)
    return all(fills_shards(shape["vocab_size"], tp, common) for tp in (serving.tp, training.tp))
