from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil, lcm

from oppo_megatron.config.derived import longest_chunk, max_context, minibatch_rows, share_of_sequences
from oppo_megatron.config.model import LearningModelConfig, ModelConfig, TrainedRoleConfig, TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.layout import activations
from oppo_megatron.layout.activations import Call, TrainingBatch
from oppo_megatron.layout.layouts import Sizes, vocab_rows
from oppo_megatron.layout.memory import (
    FEW_ROWS,
    KERNEL_BYTES,
    MOST_KERNELS,
    MOST_ROWS,
    ROW_MULTIPLE,
    Memory,
    adapter_parameters,
    gather_bytes,
    kv_slots,
    optimizer_bytes,
    packed_parameters,
    slot_tokens,
    stage_layers,
    stage_parameters,
    table_bytes,
    training_kernel_bytes,
    training_state,
)
from oppo_megatron.layout.placements import (
    RankCoordinates,
    RolePlacement,
    decodes_and_scores,
    has_own_training_weights,
    named_roles,
    role_placements,
    round_placements,
    shares_weights,
    supervised_placement,
    training_placements,
    trains_apart,
)
from oppo_megatron.layout.shape import DTYPE_BYTES, kv_bytes_per_token
from oppo_megatron.modeldir.headers import read_hf_config

SCALAR_ROLES = ("critic", "reward")


@dataclass(frozen=True)
class RoleModel(activations.Model):
    """`computed` sets `tp` and `on_cpu`."""

    shared: bool = False  # the reference, computed over the actor's base weights

    @classmethod
    def of(cls, model: ModelConfig, *, scalar: bool, shared: bool = False) -> RoleModel:
        lora = model.lora if isinstance(model, LearningModelConfig) else None
        return cls(read_hf_config(model), 1, model.dtype, scalar, lora, shared=shared)

    def laid_out(self, *placements: RolePlacement) -> RoleModel:
        """Pad the vocabulary for all layouts' tensor ranks, because weights move between them."""
        tp = lcm(*(placement.tp for placement in placements))
        return replace(self, shape={**self.shape, "vocab_size": vocab_rows(self.shape["vocab_size"], tp) * tp})

    def weights(self, placement: RolePlacement, stage: int) -> int:
        own = 0 if self.shared else self.parameters(placement, stage)
        return (own + self._adapters(placement)) * self.width

    def packed(self, placement: RolePlacement, stage: int) -> int:
        own = packed_parameters(self.shape, placement.tp, placement.pp, stage, scalar=self.scalar)
        return 0 if self.shared else own * self.width

    def parameters(self, placement: RolePlacement, stage: int) -> int:
        return stage_parameters(self.shape, placement.tp, placement.pp, stage, scalar=self.scalar, ep=placement.ep)

    def computed(self, placement: RolePlacement, *, on_cpu: bool) -> RoleModel:
        return replace(self, tp=placement.tp, ep=placement.ep, on_cpu=on_cpu)

    def trained(
        self, placement: RolePlacement, stage: int, train: TrainingLayoutConfig, batch: TrainingBatch, *, on_cpu: bool
    ) -> Memory:
        if self.lora is None:
            held, whole = (self.parameters(each, stage) for each in (placement, replace(placement, ep=1)))
        else:
            held = whole = self._adapters(placement) + (self.hidden if self.scalar and stage == placement.pp - 1 else 0)
        optimizer = training_state(whole, self.dtype, placement.copies).optimizer  # all replicas divide it
        state = replace(training_state(held, self.dtype, placement.copies), optimizer=optimizer)
        model, sizes = self.computed(placement, on_cpu=on_cpu), Sizes.of(placement, train.vpp)
        activated = activations.training_activations(model, sizes, stage, train, batch)
        gathered = 0 if self.lora else gather_bytes(self.shape, self.dtype, train, placement.tp, batch.tokens)
        return replace(state, buffers=gathered, activations=activated)

    def _adapters(self, placement: RolePlacement) -> int:
        return 0 if self.lora is None else adapter_parameters(self.shape, placement.tp, placement.pp, self.lora)


def served_stages(config: TrainConfig, name: str, serving: RolePlacement, model: RoleModel, on_cpu: bool) -> tuple[Memory, ...]:
    return tuple(served_memory(config, name, serving, model, stage, on_cpu=on_cpu)[0] for stage in range(serving.pp))


def trained_stages(
    config: TrainConfig, training: RolePlacement, model: RoleModel, train: TrainingLayoutConfig, *, on_cpu: bool
) -> tuple[Memory, ...]:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    # Minibatches are divided by tokens, so a replica may have more (short) rows: all but one per other replica.
    most = minibatch_rows(config) - training.dp + 1
    tokens = training_rows(config, training) * longest
    batch = TrainingBatch(config.runtime.micro_batch_tokens, tokens, most * config.rollout.max_response_tokens).shared(train.cp)
    kernels = training_kernel_bytes(batch.tokens) if on_cpu and model.dtype == "bfloat16" else 0
    tables = table_bytes(model.shape, max_context(config)) * train.vpp
    found = []
    for stage in range(training.pp):
        memory = model.trained(training, stage, train, batch, on_cpu=on_cpu)
        copy = model.weights(training, stage)
        found.append(replace(memory, copy=copy, kernels=kernels, buffers=memory.buffers + tables))
    return tuple(found)


def laid_out(config: TrainConfig, name: str, serving: RolePlacement, training: RolePlacement) -> RoleModel:
    shared = name == "reference" and shares_weights(config)
    return RoleModel.of(named_roles(config)[name], scalar=name in SCALAR_ROLES, shared=shared).laid_out(serving, training)


def is_one_model(train: TrainingLayoutConfig) -> bool:
    """True if the same modules serve and train."""
    return not train.sequence_parallel and train.recompute == "none" and train.cp == 1


def sequences_and_slots(config: TrainConfig, name: str, placement: RolePlacement, model: RoleModel) -> tuple[int, int]:
    """Most sequences of a replica, and the number that its cache holds."""
    sequences = share_of_sequences(config, name, placement.dp)
    context, budget_mb = slot_tokens(max_context(config), config.runtime.kv_layout), config.runtime.kv_cache_mb
    slots = kv_slots(model.shape, placement, model.dtype, slots=sequences, context=context, budget_mb=budget_mb)
    return sequences, slots


def served_memory(
    config: TrainConfig, name: str, placement: RolePlacement, model: RoleModel, stage: int, *, on_cpu: bool
) -> tuple[Memory, dict[str, float]]:
    longest = max_context(config)
    context = slot_tokens(longest, config.runtime.kv_layout)
    _, slots = sequences_and_slots(config, name, placement, model)
    cached = slots
    if name == "actor" and config.evaluation is not None:  # held-out prompts have their own cache
        cached += min(slots, config.evaluation.most_rows)
    tokens = min(config.runtime.micro_batch_tokens, slots * context)
    computed, last = model.computed(placement, on_cpu=on_cpu), stage == placement.pp - 1
    calls = _calls(config, name, tokens, slots, logits=last)
    phases = {phase: activations.cached_activations(computed, call) for phase, call in calls.items()}
    continuous, weights = config.overlap.continuous, model.weights(placement, stage)
    staged = name == "actor" and continuous is not None and continuous.install == "staged" and trains_apart(config)
    memory = Memory(
        weights=weights,
        copy=weights if staged else 0,  # new weights on their way
        packed=model.packed(placement, stage) if on_cpu else 0,
        kernels=_kernels(name, tokens, slots, makes_logits=last and not model.scalar) if on_cpu else 0,
        kv_cache=cached * context * kv_bytes_per_token(model.shape, placement, model.dtype),
        buffers=table_bytes(model.shape, longest),
        activations=max(phases.values()),
    )
    return memory, phases


def training_rows(config: TrainConfig, placement: RolePlacement) -> int:
    return ceil(minibatch_rows(config) / placement.dp)


def _calls(config: TrainConfig, name: str, tokens: int, slots: int, *, logits: bool) -> dict[str, Call]:
    """Largest cached calls by phase. On the last stage, the actor makes logits in decoding, scorers in reading."""
    longest, rollout = max_context(config), config.rollout
    gathered = slots * slot_tokens(longest, config.runtime.kv_layout) if config.runtime.kv_layout == "paged" else 0
    if name != "actor":
        return {"reading": Call(tokens, tokens if logits else 0, longest, gathered)}
    rows = slots if logits else 0
    decoding = Call(slots, rows, longest, gathered, draws=True, temperature=rollout.temperature)
    return {"reading": Call(tokens, 0, longest, gathered), "decoding": decoding}


def _kernels(name: str, tokens: int, slots: int, *, makes_logits: bool) -> int:
    """Bytes of a CPU's kernels, one per row count: the actor decodes up to `slots` rows, all roles read up to `tokens`."""
    read = max(0, -(-min(tokens, MOST_ROWS) // ROW_MULTIPLE) - FEW_ROWS // ROW_MULTIPLE)
    decoded = min(slots, FEW_ROWS) if name == "actor" else 0
    head = (decoded if name == "actor" else 2 * read) if makes_logits else 0  # log-probs: larger kernels, of fewer sizes
    return min(4 * (read + decoded) + head, MOST_KERNELS) * KERNEL_BYTES


def both_memory(served: Memory, trained: Memory, *, one_model: bool) -> Memory:
    """Sum for a role's serving and training modules; `one_model`: both use one set of rotary tables."""
    tables = served.buffers if one_model else 0
    return Memory.of_rank([served, replace(trained, copy=0, buffers=trained.buffers - tables)])


@dataclass(frozen=True)
class Holding:
    """`role`: `actor.train` if training has its own weights. `layers`: per virtual stage; `phases`: activation bytes."""

    rank: int
    role: str
    coords: RankCoordinates
    sizes: Sizes
    layers: list[range]
    memory: Memory
    batches: dict[str, str]
    phases: dict[str, float]


def planned_memory(config: TrainConfig | SupervisedConfig, *, on_cpu: bool) -> list[float]:
    """Expected bytes of each rank, without interpreter and libraries."""
    return [memory.total for memory in rank_memory(holdings_of(config, on_cpu=on_cpu)).values()]


def lasting_memory(config: TrainConfig | SupervisedConfig, *, on_cpu: bool) -> list[float]:
    """Bytes that each rank certainly holds between updates."""
    return [memory.lasting for memory in rank_memory(holdings_of(config, on_cpu=on_cpu)).values()]


def holdings_of(config: TrainConfig | SupervisedConfig, *, on_cpu: bool) -> list[Holding]:
    if isinstance(config, SupervisedConfig):
        return supervised_holdings(config, on_cpu=on_cpu)
    return train_holdings(config, on_cpu=on_cpu)


def written_bytes(config: TrainConfig | SupervisedConfig) -> float:
    """Bytes of the final weights and of one checkpoint, without adapters, which are small."""
    saves, weights, state = config.checkpoint, 0.0, 0.0
    roles = {"model": config.model} if isinstance(config, SupervisedConfig) else config.trained
    for held in holdings_of(config, on_cpu=False):
        role = roles.get(held.role.partition(".")[0])
        if role is None or role.lora is not None or not held.memory.optimizer:
            continue
        state += held.memory.optimizer  # sharded over the replicas
        weights += held.memory.optimizer * DTYPE_BYTES[role.dtype] / optimizer_bytes(role.dtype)
    checkpoints = bool(saves.saves_end or saves.every_steps or saves.every_minutes)
    return weights * saves.writes_weights * (1 + bool(saves.keep_best)) + (weights + state) * checkpoints


def rank_memory(holdings: Sequence[Holding]) -> dict[int, Memory]:
    ranks = groupby(holdings, key=lambda holding: holding.rank)
    return {rank: Memory.of_rank([each.memory for each in held]) for rank, held in ranks}


def train_holdings(config: TrainConfig, *, on_cpu: bool) -> list[Holding]:
    training, holdings = training_placements(config), list[Holding]()
    for name, placement in role_placements(config).items():
        holdings += role_holdings(config, name, placement, training.get(name, placement), on_cpu=on_cpu)
    return sorted(holdings, key=lambda holding: holding.rank)


def role_holdings(
    config: TrainConfig, name: str, serving: RolePlacement, training: RolePlacement, *, on_cpu: bool
) -> list[Holding]:
    role, model = named_roles(config)[name], laid_out(config, name, serving, training)
    sequences, slots = sequences_and_slots(config, name, serving, model)
    batches = _serving_batches(config, name, sequences, slots)
    stages = [served_memory(config, name, serving, model, stage, on_cpu=on_cpu) for stage in range(serving.pp)]
    served = []
    for at, rank in _coords_of(serving):
        (memory, phases), layers = stages[at.stage], stage_layers(model.shape, serving.pp, at.stage)
        served.append(Holding(rank, name, at, Sizes.of(serving), layers, memory, batches, phases))
    if not isinstance(role, TrainedRoleConfig):
        return served
    train, sizes = role.train, Sizes.of(training, role.train.vpp)
    update = _words(
        {
            "rollout batch B": config.rollout.batch_size, "minibatch rows": minibatch_rows(config),
            "rows a replica": training_rows(config, training), "micro-batch tokens": config.runtime.micro_batch_tokens,
        }
    )  # fmt: skip
    updates = trained_stages(config, training, model, train, on_cpu=on_cpu)
    trained = []
    for at, rank in _coords_of(training):
        memory, layers = updates[at.stage], stage_layers(model.shape, training.pp, at.stage, train.vpp)
        trained.append(Holding(rank, f"{name}.train", at, sizes, layers, memory, update, {"update": memory.activations}))
    if name not in round_placements(config):
        return trained
    if has_own_training_weights(serving, training, train.vpp):
        return [*served, *trained]
    one_model = is_one_model(train)
    return [
        replace(
            each, memory=both_memory(each.memory, other.memory, one_model=one_model), batches=batches | update,
            phases=other.phases | each.phases,
        )
        for each, other in zip(served, trained, strict=True)
    ]  # fmt: skip


def _words(sizes: Mapping[str, int]) -> dict[str, str]:
    return {heading: str(size) for heading, size in sizes.items()}


def supervised_holdings(config: SupervisedConfig, *, on_cpu: bool) -> list[Holding]:
    placement, train = supervised_placement(config), TrainingLayoutConfig(cp=config.parallel.cp, ep=config.parallel.ep)
    model = RoleModel.of(config.model, scalar=config.SCALAR)
    sequences = 2 if config.of_pairs else 1  # a chosen and a rejected completion
    rows, tokens = ceil(config.batch_size / placement.dp), config.runtime.micro_batch_tokens
    batch = TrainingBatch(tokens, rows * sequences * config.max_tokens).shared(train.cp)
    batches = _words({"rows a batch": config.batch_size, "rows a replica": rows, "micro-batch tokens": tokens})
    held = []
    for coords, rank in _coords_of(placement):
        memory = model.trained(placement, coords.stage, train, batch, on_cpu=on_cpu)
        tables = table_bytes(model.shape, config.max_tokens)
        memory = replace(memory, weights=model.weights(placement, coords.stage), buffers=tables)
        layers, phases = stage_layers(model.shape, placement.pp, coords.stage), {"update": memory.activations}
        held.append(Holding(rank, "model", coords, Sizes.of(placement), layers, memory, batches, phases))
    return sorted(held, key=lambda holding: holding.rank)


def _serving_batches(config: TrainConfig, name: str, sequences: int, slots: int) -> dict[str, str]:
    batch, overlap = config.rollout.batch_size, config.overlap
    decode, prefill = _cut(config, slots)
    deltas = [overlap.delta.initial] if overlap.delta.rule == "fixed" else [0, overlap.delta.max]
    return {
        "rollout batch B": str(batch),
        "B + delta": _span([batch + delta for delta in (deltas if overlap.inter else [0])]),
        "sequences a replica": str(sequences),
        "KV slots": str(slots),
        "decode m-batches": decode if name == "actor" else "-",
        "micro-batch tokens": str(config.runtime.micro_batch_tokens),
        "chunk C": _span([min(size, longest_chunk(config)) for size in overlap.chunk_sizes]),
        "prefill tokens": "-" if name == "actor" else prefill,
    }


def _cut(config: TrainConfig, slots: int) -> tuple[str, str]:
    """Decode micro-batches of a replica and prefill tokens of a scorer; `auto` if measured times decide."""
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


def _coords_of(placement: RolePlacement) -> Iterator[tuple[RankCoordinates, int]]:
    for rank in placement.ranks:
        coords = placement.coords(rank)
        assert coords is not None, "a placement has coordinates for each of its ranks"
        yield coords, rank
