"""A role's model with its weights, ready to decode, score or train."""

from __future__ import annotations

import torch

from oppo_megatron.config.model import ModelConfig
from oppo_megatron.runtime.mcore.groups import RoleGroups
from oppo_megatron.runtime.mcore.hf_source import open_weights
from oppo_megatron.runtime.mcore.hf_weights import load_weights
from oppo_megatron.runtime.mcore.model import Head, RoleModel, build_model


def load_role(
    config: ModelConfig, groups: RoleGroups, *, head: Head, max_length: int, device: torch.device, lean: bool = True
) -> RoleModel:
    """This rank's stage of the model that `config` names, in evaluation mode.

    Raises CheckpointError for weights that are missing or do not fit, CapacityError for too few positions.
    """
    shape, source = open_weights(config, head)
    model = build_model(shape, groups, head=head, max_length=max_length, dtype=config.dtype, device=device, lean=lean)
    load_weights(
        model, shape, source, head=head,
        tp_rank=groups.tp_rank, tp_size=groups.tp, pp_rank=groups.pp_rank, pp_size=groups.pp,
    )  # fmt: skip
    return model.eval()
