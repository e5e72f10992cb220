"""A role's model with its weights, ready to decode and score, or to be trained."""

from __future__ import annotations

import torch

from oppo_megatron.config.model import DecodePath, ModelConfig, TrainingLayoutConfig
from oppo_megatron.runtime.mcore.groups import RoleGroups
from oppo_megatron.runtime.mcore.hf_source import TensorSource, open_weights
from oppo_megatron.runtime.mcore.hf_weights import load_weights
from oppo_megatron.runtime.mcore.model import Head, RoleModel, build_chunks, build_model


def load_role(
    config: ModelConfig,
    groups: RoleGroups,
    *,
    head: Head,
    max_length: int,
    device: torch.device,
    path: DecodePath = "packed",
) -> RoleModel:
    """This rank's stage of the model that `config` names, in evaluation mode; cached calls go by `path`.

    Raises CheckpointError for weights that are missing or do not fit, CapacityError for too few positions.
    """
    shape, source = open_weights(config, head)
    model = build_model(shape, groups, head=head, max_length=max_length, dtype=config.dtype, device=device)
    _fill(model, source)
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
) -> list[RoleModel]:
    """This rank's chunks of the model, to be trained on `groups` with the options of `layout`; otherwise as `load_role`."""
    shape, source = open_weights(config, head)
    chunks = build_chunks(shape, groups, layout, head=head, max_length=max_length, dtype=config.dtype, device=device)
    for chunk in chunks:
        _fill(chunk, source)
        chunk.eval()
    return chunks


def _fill(model: RoleModel, source: TensorSource) -> None:
    load_weights(
        model, model.shape, source, head=model.head,
        tp_rank=model.groups.tp_rank, tp_size=model.groups.tp, pp_rank=model.stage, pp_size=model.num_stages,
    )  # fmt: skip
