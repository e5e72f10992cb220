"""Each rank's roles, their shares, memory and batches.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil

from oppo_megatron.config.derived import longest_chunk, minibatch_rows
from oppo_megatron.config.model import TrainedRoleConfig, TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import DPOConfig, RewardModelConfig, SupervisedConfig
from oppo_megatron.layout.activations import TrainingBatch
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.memory import (
    Memory,
    stage_layers,
    table_bytes,
)
from oppo_megatron.layout.placements import (
    RankCoordinates,
    RolePlacement,
    decodes_and_scores,
    has_own_training_weights,
    named_roles,
    role_placements,
    training_placements,
)
from oppo_megatron.layout.role_memory import (
    RoleModel,
    both_memory,
    is_one_model,
    laid_out,
    sequences_and_slots,
    served_memory,
    trained_memory,
    training_rows,
)


@dataclass(frozen=True)
class Holding:
    """One role's share on one rank.  `role` is `actor.train` if training has weights of its own.

    `layers` (from 0): a range per virtual stage; `batches`: sizes in words, by heading.  `phases`: bytes of activations in an
    update, in reading and in decoding; `memory` has the largest.
    """

    rank: int
    role: str
    coords: RankCoordinates
    sizes: Sizes
    layers: list[range]
    memory: Memory
    batches: dict[str, str]
    phases: dict[str, float]


def planned_memory(config: TrainConfig | SupervisedConfig, *, on_cpu: bool) -> list[float]:
    """Bytes that a run is expected to take of each rank's memory, without interpreter and libraries."""
    return [memory.total for memory in rank_memory(holdings_of(config, on_cpu=on_cpu)).values()]


def lasting_memory(config: TrainConfig | SupervisedConfig, *, on_cpu: bool) -> list[float]:
    """Bytes that each rank of a run holds for certain between updates."""
    return [memory.lasting for memory in rank_memory(holdings_of(config, on_cpu=on_cpu)).values()]


def holdings_of(config: TrainConfig | SupervisedConfig, *, on_cpu: bool) -> list[Holding]:
    return (
        supervised_holdings(config, on_cpu=on_cpu)
        if isinstance(config, SupervisedConfig)
        else train_holdings(config, on_cpu=on_cpu)
    )


def written_bytes(config: TrainConfig | SupervisedConfig) -> float:
    """Bytes of a run's final weights, and of one checkpoint if it writes any.  Adapters are left out: they are small."""
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
        state += held.memory.optimizer
        trains = held.memory.optimizer > 0
        weights += max(held.memory.weights, held.memory.copy) if trains and held.coords.replica == 0 else 0
    return weights * saves.writes_weights * (1 + bool(saves.keep_best)) + (weights + state) * checkpoints


def rank_memory(holdings: Sequence[Holding]) -> dict[int, Memory]:
    ranks = groupby(holdings, key=lambda holding: holding.rank)
    return {rank: Memory.of_rank([each.memory for each in held]) for rank, held in ranks}


def train_holdings(config: TrainConfig, *, on_cpu: bool) -> list[Holding]:
    """Every share of every rank of a PPO run whose configuration has passed its checks.

    `on_cpu`: decoding has weights of its own (`runtime.decode_path`).
    """
    training, holdings = training_placements(config), list[Holding]()
    for name, placement in role_placements(config).items():
        holdings += role_holdings(config, name, placement, training.get(name, placement), on_cpu=on_cpu)
    return sorted(holdings, key=lambda holding: holding.rank)


def role_holdings(
    config: TrainConfig, name: str, serving: RolePlacement, training: RolePlacement, *, on_cpu: bool
) -> list[Holding]:
    role = named_roles(config)[name]
    model = laid_out(config, name, serving, training)
    served = list(_serving(config, name, serving, model, on_cpu=on_cpu))
    if not isinstance(role, TrainedRoleConfig):
        return served
    trained = list(_training(config, name, training, model, role.train, on_cpu=on_cpu))
    if has_own_training_weights(serving, training, role.train.vpp):
        return [*served, *trained]
    one_model = is_one_model(role.train)
    return [_both(*pair, one_model=one_model) for pair in zip(served, trained, strict=True)]


def supervised_holdings(config: SupervisedConfig, *, on_cpu: bool) -> list[Holding]:
    layout = config.parallel
    placement = RolePlacement(tuple(range(layout.num_ranks)), layout.tp, layout.pp, layout.dp)
    model = RoleModel.of(config.model, scalar=config.SCALAR)
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
    config: TrainConfig, name: str, placement: RolePlacement, model: RoleModel, *, on_cpu: bool
) -> Iterator[Holding]:
    sequences, slots = sequences_and_slots(config, name, placement, model)
    batches = _serving_batches(config, name, sequences, slots)
    stages = [served_memory(config, name, placement, model, stage, on_cpu=on_cpu) for stage in range(placement.pp)]
    for coords, rank in _coords_of(placement):
        memory, phases = stages[coords.stage]
        yield Holding(
            rank, name, coords, Sizes.of(placement), _layers(model, placement, coords), memory, batches, phases
        )


def _training(
    config: TrainConfig,
    name: str,
    placement: RolePlacement,
    model: RoleModel,
    train: TrainingLayoutConfig,
    *,
    on_cpu: bool,
) -> Iterator[Holding]:
    batches = _training_batches(config, training_rows(config, placement))
    stages = [trained_memory(config, placement, model, train, stage, on_cpu=on_cpu) for stage in range(placement.pp)]
    for coords, rank in _coords_of(placement):
        memory = stages[coords.stage]
        layers = stage_layers(model.shape, placement.pp, coords.stage, train.vpp)
        phases, sizes = {"update": memory.activations}, Sizes.of(placement, train.vpp)
        yield Holding(rank, f"{name}.train", coords, sizes, layers, memory, batches, phases)


def _both(served: Holding, trained: Holding, *, one_model: bool) -> Holding:
    """`one_model`: by the same modules."""
    memory = both_memory(served.memory, trained.memory, one_model=one_model)
    batches, phases = served.batches | trained.batches, trained.phases | served.phases
    return replace(served, memory=memory, batches=batches, phases=phases)


def _serving_batches(config: TrainConfig, name: str, sequences: int, slots: int) -> dict[str, str]:
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
    delta = config.overlap.delta
    if not config.overlap.inter:
        return [0]
    return [delta.initial] if delta.rule == "fixed" else [0, delta.max]


def _chunks(config: TrainConfig) -> list[int]:
    chunk, longest = config.overlap.chunk, longest_chunk(config)
    return [min(size, longest) for size in (chunk.tokens, *(chunk.candidates if chunk.adaptive else []))]


def _cut(config: TrainConfig, slots: int) -> tuple[str, str]:
    """Decode micro-batches of a replica, and tokens of a scorer's prefill micro-batch; `auto` if measured times decide."""
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


def _layers(model: RoleModel, placement: RolePlacement, coords: RankCoordinates) -> list[range]:
    return stage_layers(model.shape, placement.pp, coords.stage)
