"""Each rank's holdings: roles, their shares, their memory and their batches.  Pure, from the settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, lcm

from oppo_megatron.config.derived import longest_chunk, max_context, minibatch_rows, share_of_sequences
from oppo_megatron.config.lora import LoraConfig
from oppo_megatron.config.model import LearningModelConfig, ModelConfig, TrainedRoleConfig, TrainingLayoutConfig
from oppo_megatron.config.preference import DPOConfig
from oppo_megatron.config.run import RewardModelConfig, SupervisedConfig, TrainConfig
from oppo_megatron.layout import activations
from oppo_megatron.layout.activations import Call, TrainingBatch
from oppo_megatron.layout.cpu_kernels import FEW_ROWS, kernel_bytes, prefill_sizes, training_kernel_bytes
from oppo_megatron.layout.layouts import Sizes, vocab_rows
from oppo_megatron.layout.memory import (
    Memory,
    Shape,
    adapter_parameters,
    gather_bytes,
    kv_cache_bytes,
    kv_slots,
    packed_parameters,
    slot_tokens,
    stage_layers,
    stage_parameters,
    table_bytes,
    training_state,
)
from oppo_megatron.layout.placements import (
    RankCoordinates,
    RolePlacement,
    decodes_and_scores,
    has_own_training_weights,
    named_roles,
    role_placements,
    shares_weights,
    training_placements,
)
from oppo_megatron.layout.shape import DTYPE_BYTES
from oppo_megatron.modeldir.headers import read_hf_config

SCALAR_ROLES = ("critic", "reward")


@dataclass(frozen=True)
class Holding:
    """One role's share on one rank.  `role` is `actor.train` where training has weights of its own.

    `layers` (from 0) are a range for each virtual stage; `batches` are sizes in words, by their heading.  `phases`: bytes of
    activations in an update, in reading and in decoding, of which `memory` has the largest.
    """

    rank: int
    role: str
    coords: RankCoordinates
    sizes: Sizes
    layers: list[range]
    memory: Memory
    batches: dict[str, str]
    phases: dict[str, float]


@dataclass(frozen=True)
class _Model:
    """What the arithmetic needs to know of a role's model."""

    shape: Shape
    dtype: str
    scalar: bool
    lora: LoraConfig | None = None
    shared: bool = False  # the reference, over the weights beside the actor's adapters

    @classmethod
    def of(cls, model: ModelConfig, *, scalar: bool, shared: bool = False) -> _Model:
        lora = model.lora if isinstance(model, LearningModelConfig) else None
        return cls(read_hf_config(model), model.dtype, scalar, lora, shared)

    def laid_out(self, *placements: RolePlacement) -> _Model:
        """With a vocabulary that the tensor ranks of every layout divide, as weights that move between layouts have it."""
        tp = lcm(*(placement.tp for placement in placements))
        return replace(self, shape={**self.shape, "vocab_size": vocab_rows(self.shape["vocab_size"], tp) * tp})

    def weights(self, placement: RolePlacement, stage: int) -> int:
        own = 0 if self.shared else self.parameters(placement, stage)
        return (own + self._adapters(placement)) * DTYPE_BYTES[self.dtype]

    def packed(self, placement: RolePlacement, stage: int) -> int:
        if self.shared:
            return 0
        return (
            packed_parameters(self.shape, placement.tp, placement.pp, stage, scalar=self.scalar)
            * DTYPE_BYTES[self.dtype]
        )

    def makes_logits(self, placement: RolePlacement, coords: RankCoordinates) -> bool:
        return not self.scalar and coords.stage == placement.pp - 1

    def parameters(self, placement: RolePlacement, stage: int) -> int:
        return stage_parameters(self.shape, placement.tp, placement.pp, stage, scalar=self.scalar)

    def computed(self, placement: RolePlacement, *, on_cpu: bool) -> activations.Model:
        return activations.Model(self.shape, placement.tp, self.dtype, self.scalar, self.lora, on_cpu)

    def trained(
        self,
        placement: RolePlacement,
        stage: int,
        train: TrainingLayoutConfig,
        batch: TrainingBatch,
        *,
        on_cpu: bool,
    ) -> Memory:
        state = training_state(self._trainable(placement, stage), self.dtype, placement.dp, train)
        model, sizes = self.computed(placement, on_cpu=on_cpu), Sizes.of(placement, train.vpp)
        held = activations.training_activations(model, sizes, stage, train, batch)
        gathered = gather_bytes(self.shape, self.dtype, train, placement.tp, batch.tokens)
        return replace(state, buffers=gathered, activations=held)

    def _adapters(self, placement: RolePlacement) -> int:
        return 0 if self.lora is None else adapter_parameters(self.shape, placement.tp, placement.pp, self.lora)

    def _trainable(self, placement: RolePlacement, stage: int) -> int:
        if self.lora is None:
            return self.parameters(placement, stage)
        return self._adapters(placement) + (
            self.shape["hidden_size"] if self.scalar and stage == placement.pp - 1 else 0
        )


def planned_memory(config: TrainConfig | SupervisedConfig, *, on_cpu: bool) -> list[float]:
    """Bytes that a run is to take of each rank's memory beside interpreter and libraries, in the order of ranks."""
    return [memory.total for memory in rank_memory(holdings_of(config, on_cpu=on_cpu)).values()]


def lasting_memory(config: TrainConfig | SupervisedConfig, *, on_cpu: bool) -> list[float]:
    """Bytes that each rank of a run holds for certain between updates, in the order of ranks."""
    return [memory.lasting for memory in rank_memory(holdings_of(config, on_cpu=on_cpu)).values()]


def holdings_of(config: TrainConfig | SupervisedConfig, *, on_cpu: bool) -> list[Holding]:
    """What every rank of a run holds."""
    return (
        supervised_holdings(config, on_cpu=on_cpu)
        if isinstance(config, SupervisedConfig)
        else train_holdings(config, on_cpu=on_cpu)
    )


def written_bytes(config: TrainConfig | SupervisedConfig) -> float:
    """Bytes of a run's final weights, and of one checkpoint where it makes any; not of adapters, which are small beside these."""
    saves = config.checkpoint
    checkpoints = bool(saves.saves_end or saves.every_steps or saves.every_minutes)
    weights = state = 0.0
    if isinstance(config, SupervisedConfig):
        if config.model.lora is not None:
            return 0.0
        holdings = supervised_holdings(config, on_cpu=False)
        weights = sum(held.memory.weights for held in holdings if held.coords.replica == 0)
        state = sum(held.memory.optimizer for held in holdings)  # sharded over the replicas
        return weights * saves.writes_weights * (1 + bool(saves.keep_best)) + (weights + state) * checkpoints
    for held in train_holdings(config, on_cpu=False):
        role = named_roles(config)[held.role.partition(".")[0]]
        if not isinstance(role, TrainedRoleConfig) or role.lora is not None:
            continue
        state += held.memory.optimizer if held.coords.replica == 0 or role.train.distributed_optimizer else 0
        trains = held.memory.optimizer > 0
        weights += max(held.memory.weights, held.memory.copy) if trains and held.coords.replica == 0 else 0
    return weights * saves.writes_weights * (1 + bool(saves.keep_best)) + (weights + state) * checkpoints


def rank_memory(holdings: Sequence[Holding]) -> dict[int, Memory]:
    """What all roles of each rank take together, by rank."""
    ranks = groupby(holdings, key=lambda holding: holding.rank)
    return {rank: Memory.of_rank([each.memory for each in held]) for rank, held in ranks}


def train_holdings(config: TrainConfig, *, on_cpu: bool) -> list[Holding]:
    """Every share of every rank of a PPO run, by rank.  The configuration has passed its checks.

    `on_cpu`: whether the ranks compute on processors, where decoding has weights of its own (`runtime.decode_path`).
    """
    training = training_placements(config)
    holdings: list[Holding] = []
    for name, placement in role_placements(config).items():
        role = named_roles(config)[name]
        shared = name == "reference" and shares_weights(config)
        model = _Model.of(role, scalar=name in SCALAR_ROLES, shared=shared).laid_out(
            placement, training.get(name, placement)
        )
        served = _serving(config, name, placement, model, on_cpu=on_cpu)
        if not isinstance(role, TrainedRoleConfig):
            holdings += served
            continue
        trained = list(_training(config, name, training[name], model, role.train, on_cpu=on_cpu))
        if has_own_training_weights(placement, training[name], role.train.vpp):
            holdings += [*served, *trained]
        else:
            one_model = not role.train.sequence_parallel and role.train.recompute == "none"
            holdings += [_both(*pair, one_model=one_model) for pair in zip(served, trained, strict=True)]
    return sorted(holdings, key=lambda holding: holding.rank)


def supervised_holdings(config: SupervisedConfig, *, on_cpu: bool) -> list[Holding]:
    """The model's share on every rank of supervised training."""
    layout = config.parallel
    placement = RolePlacement(tuple(range(layout.num_ranks)), layout.tp, layout.pp, layout.dp)
    model = _Model.of(config.model, scalar=config.SCALAR)
    sequences = 2 if isinstance(config, RewardModelConfig | DPOConfig) else 1  # a chosen and a rejected completion
    rows, tokens = ceil(config.batch_size / placement.dp), config.runtime.micro_batch_tokens
    batch = TrainingBatch(tokens, rows * sequences * config.max_tokens)
    shown = {"rows a batch": config.batch_size, "rows a replica": rows, "micro-batch tokens": tokens}
    batches = {heading: str(size) for heading, size in shown.items()}
    held = []
    for coords, rank in _coords_of(placement):
        memory = model.trained(placement, coords.stage, TrainingLayoutConfig(), batch, on_cpu=on_cpu)
        tables = table_bytes(model.shape, config.max_tokens)
        memory = replace(memory, weights=model.weights(placement, coords.stage), buffers=tables)
        layers, phases = _layers(model, placement, coords), {"update": memory.activations}
        held.append(Holding(rank, "model", coords, Sizes.of(placement), layers, memory, batches, phases))
    return sorted(held, key=lambda holding: holding.rank)


def _serving(
    config: TrainConfig, name: str, placement: RolePlacement, model: _Model, *, on_cpu: bool
) -> Iterator[Holding]:
    """Decoding or scoring: weights, cache, and what a call holds."""
    packed = on_cpu and config.runtime.decode_path == "packed"
    sequences, longest = share_of_sequences(config, name, placement.dp), max_context(config)
    context = slot_tokens(longest, config.runtime.kv_layout)
    budget_mb = config.runtime.kv_cache_mb
    slots = kv_slots(model.shape, placement, model.dtype, slots=sequences, context=context, budget_mb=budget_mb)
    cached = slots
    if name == "actor" and config.evaluation is not None:  # held-out prompts are answered over a cache of their own
        cached += min(slots, config.evaluation.max_rows)
    cache = kv_cache_bytes(model.shape, placement, model.dtype, slots=cached, context=context, budget_mb=None)
    tokens = min(config.runtime.micro_batch_tokens, slots * context)
    batches = _serving_batches(config, name, sequences, slots)
    for coords, rank in _coords_of(placement):
        computed, logits = model.computed(placement, on_cpu=on_cpu), model.makes_logits(placement, coords)
        calls = _calls(config, name, tokens, slots, logits=logits or (model.scalar and coords.stage == placement.pp - 1))
        phases = {phase: activations.cached_activations(computed, call) for phase, call in calls.items()}
        memory = Memory(
            weights=model.weights(placement, coords.stage),
            packed=model.packed(placement, coords.stage) if packed else 0,
            kernels=_kernels(name, tokens, slots, makes_logits=logits) if packed else 0,
            kv_cache=cache,
            buffers=table_bytes(model.shape, longest),
            activations=max(phases.values()),
        )
        layers = _layers(model, placement, coords)
        yield Holding(rank, name, coords, Sizes.of(placement), layers, memory, batches, phases)


def _training(
    config: TrainConfig,
    name: str,
    placement: RolePlacement,
    model: _Model,
    train: TrainingLayoutConfig,
    *,
    on_cpu: bool,
) -> Iterator[Holding]:
    """The update, with weights of its own."""
    rows = ceil(minibatch_rows(config) / placement.dp)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    batch = TrainingBatch(config.runtime.micro_batch_tokens, rows * longest)
    kernels = training_kernel_bytes(batch.tokens) if on_cpu and model.dtype == "bfloat16" else 0
    for coords, rank in _coords_of(placement):
        memory = model.trained(placement, coords.stage, train, batch, on_cpu=on_cpu)
        tables = memory.buffers + table_bytes(model.shape, max_context(config)) * train.vpp
        copy = model.weights(placement, coords.stage)
        memory = replace(memory, copy=copy, kernels=kernels, buffers=tables)
        layers = stage_layers(model.shape, placement.pp, coords.stage, train.vpp)
        batches, phases = _training_batches(config, rows), {"update": memory.activations}
        sizes = Sizes.of(placement, train.vpp)
        yield Holding(rank, f"{name}.train", coords, sizes, layers, memory, batches, phases)


def _calls(config: TrainConfig, name: str, tokens: int, slots: int, *, logits: bool) -> dict[str, Call]:
    """The largest cached calls, by phase; `logits`: on the last stage, where the actor makes them as it decodes, scorers as
    they read."""
    longest, rollout = max_context(config), config.rollout
    gathered = slots * slot_tokens(longest, config.runtime.kv_layout) if config.runtime.kv_layout == "paged" else 0
    if name != "actor":
        return {"reading": Call(tokens, tokens if logits else 0, longest, gathered)}
    rows = slots if logits else 0
    decoding = Call(slots, rows, longest, gathered, draws=True, temperature=rollout.temperature)
    return {"reading": Call(tokens, 0, longest, gathered), "decoding": decoding}


def _kernels(name: str, tokens: int, slots: int, *, makes_logits: bool) -> int:
    """Bytes of the kernels of a role's products: the actor decodes any number of sequences, all roles read up to `tokens`."""
    read, decoded = prefill_sizes(tokens), min(slots, FEW_ROWS) if name == "actor" else 0
    return kernel_bytes(read + decoded, (decoded if name == "actor" else read) if makes_logits else 0)


def _both(served: Holding, trained: Holding, *, one_model: bool) -> Holding:
    """Serving and training over the same weights; `one_model`: by the same modules, with one set of rotary tables."""
    tables = served.memory.buffers if one_model else 0
    own = replace(trained.memory, copy=0, buffers=trained.memory.buffers - tables)
    memory = Memory.of_rank([served.memory, own])
    batches, phases = served.batches | trained.batches, trained.phases | served.phases
    return replace(served, memory=memory, batches=batches, phases=phases)


def _serving_batches(config: TrainConfig, name: str, sequences: int, slots: int) -> dict[str, str]:
    """`sequences` are the most that a replica has, `slots` those of them that its cache holds at once."""
    batch, tokens = config.rollout.batch_size, config.runtime.micro_batch_tokens
    decode, prefill = _cut(config, slots)
    return {
        "rollout batch B": str(batch),
        "B + delta": _span([batch + delta for delta in _deltas(config)]),
        "sequences a replica": str(sequences),
        "KV slots": str(slots),
        "decode m-batches": decode if name == "actor" else "-",
        "micro-batch tokens": str(tokens),
        "chunk C": _span(_chunks(config)),
        "prefill tokens": "-" if name == "actor" else prefill,
    }


def _deltas(config: TrainConfig) -> list[int]:
    """The sizes between which delta moves."""
    delta = config.overlap.delta
    if not config.overlap.inter:
        return [0]
    return [delta.initial] if delta.rule == "fixed" else [delta.min, delta.max]


def _chunks(config: TrainConfig) -> list[int]:
    """The chunk sizes that a run may use."""
    chunk, longest = config.overlap.chunk, longest_chunk(config)
    return [min(size, longest) for size in (chunk.tokens, *(chunk.candidates if chunk.adaptive else []))]


def _cut(config: TrainConfig, slots: int) -> tuple[str, str]:
    """Decode micro-batches of a replica, and tokens of a scorer's prefill micro-batch; `auto` where measured times decide."""
    (micro_batches, tokens), placements = config.overlap.weave, role_placements(config)
    most = config.runtime.micro_batch_tokens
    woven = config.overlap.intra and config.overlap.schedule != "intra" and decodes_and_scores(placements)
    measured = woven and placements["actor"].pp > 1
    decode = "auto" if measured else "1"
    prefill = "auto" if measured else str(most)
    if micro_batches != "auto":
        decode = str(min(micro_batches, slots))
    if tokens != "auto":
        prefill = str(min(tokens, most))
    return decode, prefill


def _span(sizes: Sequence[int]) -> str:
    least, most = min(sizes), max(sizes)
    return str(least) if least == most else f"{least}-{most}"


def _training_batches(config: TrainConfig, rows: int) -> dict[str, str]:
    return {
        "rollout batch B": str(config.rollout.batch_size),
        "minibatch rows": str(minibatch_rows(config)),
        "rows a replica": str(rows),
        "micro-batch tokens": str(config.runtime.micro_batch_tokens),
    }


def _coords_of(placement: RolePlacement) -> Iterator[tuple[RankCoordinates, int]]:
    for rank in placement.ranks:
        coords = placement.coords(rank)
        assert coords is not None, "a placement has coordinates for each of its ranks"
        yield coords, rank


def _layers(model: _Model, placement: RolePlacement, coords: RankCoordinates) -> list[range]:
    return stage_layers(model.shape, placement.pp, coords.stage)
