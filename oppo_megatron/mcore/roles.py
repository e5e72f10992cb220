"""Models with weights, ready for decoding, scoring or training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from oppo_megatron.config.model import (
    HEADS_LEARNED,
    LearningModelConfig,
    LoraConfig,
    ModelConfig,
    TrainingLayoutConfig,
    weight_seed,
)
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.kernels import LayerKind, find_available, layer_kind
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.mcore.lora import attach_adapters
from oppo_megatron.mcore.model import DecodePath, RoleModel, build_chunks, build_model
from oppo_megatron.mcore.weights.hf_source import open_weights
from oppo_megatron.mcore.weights.hf_weights import fill_adapters, load_weights, open_adapters
from oppo_megatron.mcore.weights.weight_sync import share_parameters


def load_role(config: ModelConfig, groups: RoleGroups, *, path: DecodePath = "packed", **options: Any) -> RoleModel:
    (model,) = load_training(config, None, groups, **options)
    model.decode_by(path)
    return model


def load_training(
    config: ModelConfig, layout: TrainingLayoutConfig | None, groups: RoleGroups, *, head: Head, max_length: int,
    device: torch.device, layers: LayerKind | None = None, vocab_multiple: int = 1, role: str = "actor",
) -> list[RoleModel]:  # fmt: skip
    """Load this rank's chunks in `layout` (None: serving); `role` decides the seed and if a missing scalar head is drawn.

    `vocab_multiple`: of all tensor ranks, if weights move.  Raises CheckpointError, or CapacityError for too few positions.
    """
    shape, source = open_weights(config, head, seed=weight_seed(role), fresh_head=role in HEADS_LEARNED)
    lora = _lora(config)
    if lora is not None and lora.adapter is not None:
        open_adapters(lora.adapter, shape, lora, head)  # to refuse them before a model is built
    available = find_available(device.type == "cuda")
    chunks = build_chunks(
        replace(shape, vocab_multiple=vocab_multiple), groups, layout, head=head, max_length=max_length,
        dtype=config.dtype, device=device, layers=layers or layer_kind(available, adapters=lora is not None),
    )  # fmt: skip
    for chunk in chunks:
        load_weights(
            chunk, chunk.shape, source, head=head,
            tp_rank=groups.place, tp_size=groups.tp, ep_size=groups.ep, pp_rank=chunk.stage, pp_size=chunk.num_stages,
        )  # fmt: skip
        _fill_adapters(chunk, config, role)
        chunk.eval()
    return chunks


def as_it_began(adapted: RoleModel, groups: RoleGroups, config: ModelConfig) -> RoleModel:
    """Return the initial model of an adapted one, with shared weights."""
    device = next(adapted.parameters()).device
    model = build_model(
        adapted.shape, groups, head=adapted.head, max_length=adapted.max_length, dtype=config.dtype, device=device
    )
    share_parameters(adapted, model)
    _fill_adapters(model, config, "actor")
    model.compute_as(adapted)
    return model.requires_grad_(False).eval()


def _lora(config: ModelConfig) -> LoraConfig | None:
    return config.lora if isinstance(config, LearningModelConfig) else None


def _fill_adapters(model: RoleModel, config: ModelConfig, role: str) -> None:
    if (lora := _lora(config)) is not None:
        attach_adapters(model, lora)
        fill_adapters(model, lora, weight_seed(role))
