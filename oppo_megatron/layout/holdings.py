"""Each rank's roles, shares, memory and batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil

from oppo_megatron.config.derived import longest_chunk, minibatch_rows
from oppo_megatron.config.model import TrainedRoleConfig, TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.layout.activations import TrainingBatch
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.memory import Memory, stage_layers, table_bytes
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
    trained_stages,
    training_rows,
)


@dataclass(frozen=True)
class Holding:
    """A role's share on a rank; `actor.train` if training has its own weights. `layers`: a range per virtual stage; `phases`:
    activation bytes.
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
    """Expected bytes of each rank, without interpreter and libraries."""
    return [memory.total for memory in rank_memory(holdings_of(config, on_cpu=on_cpu)).values()]


def lasting_memory(config: TrainConfig | SupervisedConfig, *, on_cpu: bool) -> list[float]:
    """Bytes that each rank holds for certain between updates."""
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
        weights += max(held.memory.weights, held.memory.copy) if held.coords.replica == 0 else 0
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
    layout = config.parallel
    placement = RolePlacement(tuple(range(layout.num_ranks)), layout.tp, layout.pp, layout.dp)
    model = RoleModel.of(config.model, scalar=config.SCALAR)
    sequences = 2 if config.of_pairs else 1  # a chosen and a rejected completion
    rows, tokens = ceil(config.batch_size / placement.dp), config.runtime.micro_batch_tokens
    batch = TrainingBatch(tokens, rows * sequences * config.max_tokens)
    batches = _words({"rows a batch": config.batch_size, "rows a replica": rows, "micro-batch tokens": tokens})
    held = []
    for coords, rank in _coords_of(placement):
        memory = model.trained(placement, coords.stage, TrainingLayoutConfig(), batch, on_cpu=on_cpu)
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
