"""Models with weights, ready for decoding, scoring or training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from oppo_megatron.config.model import (
    DecodePath,
    Layers,
    LearningModelConfig,
    LoraConfig,
    ModelConfig,
    TrainingLayoutConfig,
)
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.kernels import find_available, layer_kind, layers_refused
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.mcore.lora import attach_adapters
from oppo_megatron.mcore.model import RoleModel, build_chunks, build_model
from oppo_megatron.mcore.weights.hf_source import open_weights
from oppo_megatron.mcore.weights.hf_weights import load_weights
from oppo_megatron.mcore.weights.lora_weights import fill_adapters, open_adapters
from oppo_megatron.mcore.weights.weight_sync import share_parameters


def load_role(config: ModelConfig, groups: RoleGroups, *, path: DecodePath = "packed", **options: Any) -> RoleModel:
    """Load this rank's stage of a serving model."""
    (model,) = load_training(config, None, groups, **options)
    model.decode_by(path)
    return model


def load_training(
    config: ModelConfig,
    layout: TrainingLayoutConfig | None,
    groups: RoleGroups,
    *,
    head: Head,
    max_length: int,
    device: torch.device,
    layers: Layers = "torch",
    vocab_multiple: int = 1,
) -> list[RoleModel]:
    """Load this rank's chunks, in evaluation mode, in `layout` (None: serving).

    `vocab_multiple`: a multiple of all layouts' tensor ranks, if weights move.  Raises CheckpointError if weights do not fit,
    CapacityError for too few positions, ConfigError for unusable layers.
    """
    shape, source = open_weights(config, head)
    lora = _lora(config)
    if lora is not None and lora.adapter is not None:
        open_adapters(lora.adapter, shape, lora, head)  # to refuse them before a model is built
    available = find_available(device.type == "cuda")
    if problem := layers_refused(layers, available, adapters=lora is not None):  # the device of `auto` is known only here
        raise ConfigError(problem)
    chunks = build_chunks(
        replace(shape, vocab_multiple=vocab_multiple), groups, layout, head=head, max_length=max_length,
        dtype=config.dtype, device=device, layers=layer_kind(layers, available, adapters=lora is not None),
    )  # fmt: skip
    for chunk in chunks:
        load_weights(
            chunk, chunk.shape, source, head=head,
            tp_rank=groups.tp_rank, tp_size=groups.tp, pp_rank=chunk.stage, pp_size=chunk.num_stages,
        )  # fmt: skip
        _fill_adapters(chunk, config)
        chunk.eval()
    return chunks


def as_it_began(adapted: RoleModel, groups: RoleGroups, config: ModelConfig) -> RoleModel:
    """Return the initial model of a model with adapters, for scoring: same layout, shared weights, adapters of `config`."""
    device = next(adapted.parameters()).device
    model = build_model(
        adapted.shape, groups, head=adapted.head, max_length=adapted.max_length, dtype=config.dtype, device=device
    )
    share_parameters(adapted, model)
    _fill_adapters(model, config)
    model.compute_as(adapted)
    return model.requires_grad_(False).eval()


def _lora(config: ModelConfig) -> LoraConfig | None:
    return config.lora if isinstance(config, LearningModelConfig) else None


def _fill_adapters(model: RoleModel, config: ModelConfig) -> None:
    if (lora := _lora(config)) is not None:
        attach_adapters(model, lora)
        fill_adapters(model, lora, config.init_seed)
