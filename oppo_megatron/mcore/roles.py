"""A role's model with its weights, ready for decoding and scoring, or for training."""

from __future__ import annotations

from dataclasses import replace

import torch

from oppo_megatron.config.model import DecodePath, Layers, LearningModelConfig, ModelConfig, TrainingLayoutConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.kernels import LayerKind, find_available, layer_kind, layers_refused
from oppo_megatron.layout.model_shape import ModelShape
from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.mcore.lora import attach_adapters
from oppo_megatron.mcore.model import Head, RoleModel, build_chunks, build_model
from oppo_megatron.mcore.weights.hf_source import TensorSource, open_weights
from oppo_megatron.mcore.weights.hf_weights import load_weights
from oppo_megatron.mcore.weights.lora_weights import fill_adapters, open_adapters
from oppo_megatron.mcore.weights.weight_sync import share_parameters


def load_role(
    config: ModelConfig,
    groups: RoleGroups,
    *,
    head: Head,
    max_length: int,
    device: torch.device,
    path: DecodePath = "packed",
    layers: Layers = "torch",
    vocab_multiple: int = 1,
) -> RoleModel:
    """This rank's stage of the model in `config`, in evaluation mode; `path`: computation of cached calls.

    `vocab_multiple` (`ModelShape`): if weights move between layouts, a multiple of all their tensor ranks.

    Raises CheckpointError for weights that are missing or do not fit, CapacityError for too few positions, ConfigError for
    layers of a library that cannot be used here.
    """
    shape, source = _open(config, head, vocab_multiple)
    kind = _layer_kind(config, layers, device)
    model = build_model(shape, groups, head=head, max_length=max_length, dtype=config.dtype, device=device, layers=kind)
    _fill(model, source, config)
    model.decode_by(path)
    return model.eval()


def load_training(
    config: ModelConfig,
    layout: TrainingLayoutConfig,
    groups: RoleGroups,
    *,
    head: Head,
    max_length: int,
    device: torch.device,
    layers: Layers = "torch",
    vocab_multiple: int = 1,
) -> list[RoleModel]:
    """This rank's chunks of the model, for training on `groups` with the options of `layout`; otherwise as `load_role`."""
    shape, source = _open(config, head, vocab_multiple)
    kind = _layer_kind(config, layers, device)
    chunks = build_chunks(
        shape, groups, layout, head=head, max_length=max_length, dtype=config.dtype, device=device, layers=kind
    )
    for chunk in chunks:
        _fill(chunk, source, config)
        chunk.eval()
    return chunks


def as_it_began(adapted: RoleModel, groups: RoleGroups, config: ModelConfig) -> RoleModel:
    """The initial model of a model with adapters, for scoring, in the same layout and sharing its weights.

    `config` has the adapters that the run started from, if any; new adapters add 0 at the start.
    """
    device = next(adapted.parameters()).device
    model = build_model(
        adapted.shape, groups, head=adapted.head, max_length=adapted.max_length, dtype=config.dtype, device=device
    )
    share_parameters(adapted, model)
    _fill_adapters(model, config)
    model.compute_as(adapted)
    return model.requires_grad_(False).eval()


def _open(config: ModelConfig, head: Head, vocab_multiple: int) -> tuple[ModelShape, TensorSource]:
    """Shape and weights of a role, after a check of its adapters.  Reads headers only."""
    shape, source = open_weights(config, head)
    if isinstance(config, LearningModelConfig) and config.lora is not None and config.lora.adapter is not None:
        open_adapters(config.lora.adapter, shape, config.lora, head)
    return replace(shape, vocab_multiple=vocab_multiple), source


def _layer_kind(config: ModelConfig, wanted: Layers, device: torch.device) -> LayerKind:
    adapters = isinstance(config, LearningModelConfig) and config.lora is not None
    available = find_available(device.type == "cuda")
    if problem := layers_refused(wanted, available, adapters=adapters):  # the device of `auto` is known only here
        raise ConfigError(problem)
    return layer_kind(wanted, available, adapters=adapters)


def _fill(model: RoleModel, source: TensorSource, config: ModelConfig) -> None:
    load_weights(
        model, model.shape, source, head=model.head,
        tp_rank=model.groups.tp_rank, tp_size=model.groups.tp, pp_rank=model.stage, pp_size=model.num_stages,
    )  # fmt: skip
    _fill_adapters(model, config)


def _fill_adapters(model: RoleModel, config: ModelConfig) -> None:
    if isinstance(config, LearningModelConfig) and config.lora is not None:
        attach_adapters(model, config.lora)
        fill_adapters(model, config.lora, config.init_seed)
