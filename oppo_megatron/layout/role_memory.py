"""Memory of a role's ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, lcm

from oppo_megatron.config.derived import max_context, minibatch_rows, share_of_sequences
from oppo_megatron.config.model import LearningModelConfig, ModelConfig, TrainingLayoutConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.layout import activations
from oppo_megatron.layout.activations import Call, TrainingBatch
from oppo_megatron.layout.layouts import Sizes, vocab_rows
from oppo_megatron.layout.memory import (
    FEW_ROWS,
    Memory,
    adapter_parameters,
    gather_bytes,
    kernel_bytes,
    kv_slots,
    packed_parameters,
    prefill_sizes,
    slot_tokens,
    stage_parameters,
    table_bytes,
    training_kernel_bytes,
    training_state,
)
from oppo_megatron.layout.placements import RolePlacement, named_roles, shares_weights
from oppo_megatron.layout.shape import kv_bytes_per_token
from oppo_megatron.modeldir.headers import read_hf_config

SCALAR_ROLES = ("critic", "reward")


@dataclass(frozen=True)
class RoleModel(activations.Model):
    """A role's model; `computed` sets `tp` and `on_cpu`."""

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
        return stage_parameters(self.shape, placement.tp, placement.pp, stage, scalar=self.scalar)

    def computed(self, placement: RolePlacement, *, on_cpu: bool) -> RoleModel:
        return replace(self, tp=placement.tp, on_cpu=on_cpu)

    def trained(
        self, placement: RolePlacement, stage: int, train: TrainingLayoutConfig, batch: TrainingBatch, *, on_cpu: bool
    ) -> Memory:
        if self.lora is None:
            trainable = self.parameters(placement, stage)
        else:
            trainable = self._adapters(placement) + (self.hidden if self.scalar and stage == placement.pp - 1 else 0)
        state = training_state(trainable, self.dtype, placement.dp)
        model, sizes = self.computed(placement, on_cpu=on_cpu), Sizes.of(placement, train.vpp)
        held = activations.training_activations(model, sizes, stage, train, batch)
        gathered = 0 if self.lora else gather_bytes(self.shape, self.dtype, train, placement.tp, batch.tokens)
        return replace(state, buffers=gathered, activations=held)

    def _adapters(self, placement: RolePlacement) -> int:
        return 0 if self.lora is None else adapter_parameters(self.shape, placement.tp, placement.pp, self.lora)


def served_stages(
    config: TrainConfig, name: str, serving: RolePlacement, model: RoleModel, *, on_cpu: bool
) -> tuple[Memory, ...]:
    return tuple(served_memory(config, name, serving, model, stage, on_cpu=on_cpu)[0] for stage in range(serving.pp))


def trained_stages(
    config: TrainConfig, training: RolePlacement, model: RoleModel, train: TrainingLayoutConfig, *, on_cpu: bool
) -> tuple[Memory, ...]:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    # Minibatches are divided by tokens, so a replica may have more (short) rows: all but one per other replica.
    most = minibatch_rows(config) - training.dp + 1
    tokens = training_rows(config, training) * longest
    batch = TrainingBatch(config.runtime.micro_batch_tokens, tokens, most * config.rollout.max_response_tokens)
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
    return not train.sequence_parallel and train.recompute == "none"


def sequences_and_slots(config: TrainConfig, name: str, placement: RolePlacement, model: RoleModel) -> tuple[int, int]:
    """Most sequences of a replica, and how many its cache holds at once."""
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
    memory = Memory(
        weights=model.weights(placement, stage),
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
    """The actor decodes any number of sequences; all roles read up to `tokens`."""
    read, decoded = prefill_sizes(tokens), min(slots, FEW_ROWS) if name == "actor" else 0
    return kernel_bytes(read + decoded, (decoded if name == "actor" else read) if makes_logits else 0)


def both_memory(served: Memory, trained: Memory, *, one_model: bool) -> Memory:
    """`one_model`: one set of rotary tables."""
    tables = served.buffers if one_model else 0
    return Memory.of_rank([served, replace(trained, copy=0, buffers=trained.buffers - tables)])
