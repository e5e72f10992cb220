"""Plain calls from one pipeline stage to the next, for what the product's schedules do by messages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from oppo_megatron.mcore.groups import RoleGroups
from oppo_megatron.mcore.model import RoleModel


def stage_inputs(model: RoleModel, tokens_T: Tensor) -> Tensor:
    """Inputs of this stage: the tokens on the first one, on others the hidden states of the one before, [T, 1, H]."""
    groups = model.groups
    if groups.pp_rank == 0:
        return tokens_T
    dtype = next(model.parameters()).dtype
    hidden = torch.empty(len(tokens_T), 1, model.shape.hidden_size, dtype=dtype)
    dist.recv(hidden, stage_rank(groups, groups.pp_rank - 1))
    return hidden


def pass_on(model: RoleModel, out: Tensor) -> None:
    if not model.groups.is_last_stage:
        dist.send(out.contiguous(), stage_rank(model.groups, model.groups.pp_rank + 1))


def stage_rank(groups: RoleGroups, pp_rank: int) -> int:
    return dist.get_global_rank(groups.collection.pp, pp_rank)
