"""The work of each rank in the tests of Megatron's checkpoints: megatron-core's names, shards and loader, in any layout.
Files are written by torch's writer in this process: megatron-core's own forks, which a test's rank may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import FileSystemWriter

from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.weights.hf_weights import export_weights
from tests.parity.weight_jobs import build


def save_by_megatron(src: str, dst: str, tp: int, pp: int, head: Head, prefix: str, per_layer: bool) -> None:
    """The directory's model, with the tensors that megatron-core makes of it, in its planner's pieces."""
    model, folder = build(Path(src), tp, pp, head), Path(dst)
    sharded, common = save_preprocess(_sharded(model, prefix, per_layer))
    renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    torch_checkpoint.save(mcore_to_pyt_state_dict(renamed, False), storage_writer=FileSystemWriter(folder), planner=planner)
    if dist.get_rank() == 0:
        torch.save(common, folder / "common.pt")
        save_config(CheckpointingConfig("torch_dist", 1), dst)


def load_by_megatron(hf: str, src: str, dst: str, tp: int, pp: int, head: Head, prefix: str) -> None:
    """Weights of `src` by megatron-core's loader, put into a model of the directory `hf`'s shape and exported to `dst`."""
    model = build(Path(hf), tp, pp, head)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    loaded = dist_checkpointing.load(_sharded(model, prefix, per_layer=False), src)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(loaded[f"{prefix}{name}"])
    export_weights(model, Path(dst))


def _sharded(model: RoleModel, prefix: str, per_layer: bool) -> dict[str, Any]:
    metadata = {"dp_cp_group": model.groups.collection.dp_cp, "non_homogeneous_layers": per_layer}
    tree = model.sharded_state_dict(prefix=prefix, metadata=metadata)
    return {key: value for key, value in tree.items() if not key.endswith("_extra_state")}
