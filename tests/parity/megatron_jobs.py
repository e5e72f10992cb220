"""Jobs of ranks: models' logits and weights."""

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

from oppo_megatron.config.model import ModelConfig
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.mcore.attention import PackedPlan
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.mcore.model import RoleModel, build_model
from oppo_megatron.mcore.weights.hf_source import open_weights
from oppo_megatron.mcore.weights.hf_weights import export_weights, load_weights
from tests.gloo.models import gather_logits, pass_on, stage_inputs


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


def build(directory: Path, tp: int, pp: int, head: Head, max_length: int = 64, dtype: str = "float32") -> RoleModel:
    shape, source = open_weights(ModelConfig(checkpoint=directory), head)
    groups = build_groups(range(dist.get_world_size()), tp, pp, "model")
    model = build_model(shape, groups, head=head, max_length=max_length, dtype=dtype, device=torch.device("cpu"))
    place = {"tp_rank": groups.tp_rank, "tp_size": tp, "pp_rank": groups.pp_rank, "pp_size": pp}
    load_weights(model, shape, source, head=head, **place)
    return model


def load_and_export(src: str, dst: str, tp: int, pp: int, head: Head) -> bool:
    """HF -> ranks -> HF.  Returns whether the directory was whole when this rank's call came back."""
    export_weights(build(Path(src), tp, pp, head), Path(dst), max_shard_bytes=20_000)
    return (Path(dst) / "config.json").is_file()


def full_logits(
    src: str, tp: int, pp: int, head: Head, sequences: list[list[int]], dtype: str = "float32"
) -> torch.Tensor | None:
    """Logits [T, V] or scalars [T] of packed whole sequences, on the role's output rank."""
    model = build(Path(src), tp, pp, head, max_length=max(map(len, sequences)), dtype=dtype)
    groups = model.groups
    plan = PackedPlan([len(tokens) for tokens in sequences], model.rope)
    tokens_T = torch.tensor([token for tokens in sequences for token in tokens])
    with torch.no_grad():
        inputs, first = stage_inputs(model, tokens_T), groups.pp_rank == 0
        if not first:
            model.set_input_tensor(inputs)
        out = model(tokens_T if first else None, plan)
        pass_on(model, out)
        if not groups.is_last_stage:
            return None
        if head == "lm":
            out = gather_logits(model.logits(out), model.vocab)
    return out if dist.get_rank() == groups.output_rank else None
