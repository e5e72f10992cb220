"""Trained models in megatron-core checkpoints (torch_dist), for any layout to load.

Optimizer shares are gathered (distrib_optimizer.py needs Apex or TE); no forked process writes (filesystem_async.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn import Parameter

from oppo_megatron.cluster.process_groups import is_lost_peer
from oppo_megatron.errors import CheckpointError
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.weights.dist_source import INDEX, read_plain_index, reason_of
from oppo_megatron.mcore.weights.hf_writer import hf_config
from oppo_megatron.modeldir.megatron import SHAPE

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "fp32_param"


@dataclass(frozen=True)
class ModelShards:
    """Tensors with offsets, the rest, and `config.json` of models whose first rank this is."""

    sharded: dict[str, Any]
    common: dict[str, Any]
    shapes: dict[str, dict[str, Any]]
    num_bytes: int


def gather_models(models: Mapping[str, TrainedModel], *, copied: bool) -> ModelShards:
    """Gather on every rank of the world.  `copied`: training may continue."""
    tree: dict[str, Any] = {}
    for name, model in models.items():
        tree |= _Shards(name, model).tree()
    sharded, common = save_preprocess(tree)
    renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=copied)
    if copied:
        for pieces in renamed.values():
            for piece in pieces:
                piece.data = piece.data.detach().to("cpu", copy=True)
    shapes = {
        name: hf_config(first.shape, first.head, next(first.parameters()).dtype)
        for name, first in ((name, model.model) for name, model in models.items())
        if dist.get_rank() == first.groups.ranks[0]
    }
    num_bytes = 0
    for model in models.values():
        for param in (each for each in _trained(model) if _replicas(model, each).rank() == 0):
            states = len(MOMENTS) + (param.dtype != torch.float32)
            num_bytes += param.numel() * (param.element_size() + states * torch.float32.itemsize)
    return ModelShards(mcore_to_pyt_state_dict(renamed, False), common, shapes, num_bytes)


def write_models(folder: Path, shards: ModelShards, group: dist.ProcessGroup) -> None:
    """Write into an empty folder, on every rank.  Raises CheckpointError on all, OSError on one after the last message."""
    try:
        torch_checkpoint.save(
            shards.sharded,
            storage_writer=_Writer(folder, overwrite=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
        )
    except CheckpointException as error:
        raise CheckpointError(_reason(error)) from error
    for name, shape in shards.shapes.items():  # by this folder a role of another run names these weights
        (folder / name).mkdir()
        (folder / name / SHAPE).write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")
    if group.rank() == 0:
        write_common(shards.common, folder)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def write_common(common: dict[str, Any], folder: Path) -> None:
    torch.save(common, folder / COMMON_STATE_FNAME)


def load_models(folder: Path, models: Mapping[str, TrainedModel], updates: Mapping[str, int]) -> None:
    """Load weights and optimizers after `updates` steps.  Raises CheckpointError."""
    shards = [_Shards(name, model, updates[name]) for name, model in models.items()]
    tree = {key: tensor for each in shards for key, tensor in each.tree().items()}
    remedy = "resume with the models that the run began with (layouts may differ), or start a new run in another run_dir"
    loaded = _loaded(folder, tree, "the models of this configuration", remedy)
    for each in shards:
        each.take(loaded)


def load_adapters(folder: Path, name: str, model: RoleModel) -> None:
    """Load adapters, on all ranks.  Raises CheckpointError if missing."""
    prefix = f"{name}."
    weights = model.sharded_state_dict(prefix=prefix, metadata={"dp_cp_group": model.groups.collection.dp_cp})
    adapters = {key: param for key, param in model.named_parameters() if param.requires_grad}
    tree = {key: weights[f"{prefix}{key}"] for key in adapters}
    loaded = _loaded(folder, tree, f"the adapters of {name}", "name another of the run")
    with torch.no_grad():
        for key, param in adapters.items():
            param.copy_(loaded[key])
    model.end_weight_update()


def _loaded(folder: Path, tree: dict[str, Any], what: str, remedy: str) -> Mapping[str, Any]:
    read_plain_index(folder / INDEX)
    try:
        loaded: Mapping[str, Any] = dist_checkpointing.load(tree, str(folder))
    except (Exception, CheckpointException) as error:  # malformed files lead to many kinds; torch's is not an Exception
        if isinstance(error, RuntimeError) and is_lost_peer(error):
            raise
        raise CheckpointError(f"{folder}: the checkpoint does not hold {what} ({_reason(error)}); {remedy}") from error
    return loaded


class _Writer(torch_checkpoint.FileSystemWriter):
    """Raises the system's error, which torch replaces."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            before: BaseException | None = error
            while before is not None and not isinstance(before, OSError):
                before = before.__cause__ or before.__context__
            if before is None:
                raise
            raise before from None


class _Shards:
    def __init__(self, name: str, model: TrainedModel, updates: int | None = None):
        """`updates`: steps to load; None: gather, creating missing state."""
        self.name, self._model, self._gather = name, model, updates is None
        for optimizer in model.optimizer.chained_optimizers:
            inner = optimizer.optimizer
            by_group = not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW))  # fused ones count steps there
            for group in inner.param_groups:
                if by_group and updates is not None:
                    group["step"] = updates
                for param in group["params"]:
                    state = inner.state[param]
                    for moment in MOMENTS:
                        state.setdefault(moment, torch.zeros_like(param.data))
                    if not by_group and (updates is not None or "step" not in state):
                        state["step"] = torch.tensor(float(updates or 0), device=param.device)  # as fused AdamW has it
        self._pieces = dict(_pieces(model))

    def tree(self) -> dict[str, Any]:
        groups = self._model.model.groups
        tree: dict[str, Any] = {}
        for number, chunk in enumerate(self._model.chunks):
            prefix = f"{self.name}."
            weights = chunk.sharded_state_dict(prefix=prefix, metadata={"dp_cp_group": groups.collection.dp_cp})
            for key, param in self._weights(number):
                tree[key] = weights[key.removeprefix(f"{number}:")]
                for part, values in self._state(param).items():
                    sharded = make_sharded_optimizer_tensor(tree[key], values, f"optimizer.state.{part}")
                    tree[f"{part}:{key}"] = sharded
        return tree

    def take(self, loaded: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for number in range(len(self._model.chunks)):
                for key, param in self._weights(number):
                    param.data.copy_(loaded[key])
                    elements, parts = self._pieces.get(param, (slice(0), {}))
                    for part, target in parts.items():
                        target.copy_(loaded[f"{part}:{key}"].flatten()[elements].view(target.shape))

    def _weights(self, number: int) -> Iterator[tuple[str, Parameter]]:
        for name, param in self._model.chunks[number].named_parameters():
            if param.requires_grad:
                yield f"{number}:{self.name}.{name}", param

    def _state(self, param: Parameter) -> dict[str, Tensor]:
        elements, found = self._pieces.get(param, (slice(0), {}))
        if self._gather and not self._model.sharded:
            return found
        whole: dict[str, Tensor] = {}
        for name in (*MOMENTS, MASTER) if param.dtype != torch.float32 else MOMENTS:
            values = torch.zeros(param.shape, dtype=torch.float32, device=param.device if self._gather else "cpu")
            if self._gather:
                if found:
                    values.view(-1)[elements] = found[name].flatten()
                dist.all_reduce(values, group=_replicas(self._model, param))  # zeros elsewhere: the sum is exact
            whole[name] = values.cpu()
        return whole


def _reason(error: BaseException) -> str:
    failures = getattr(error, "failures", None) or {}
    first = next((wrapped[0] for wrapped in failures.values()), error)
    return reason_of(first)


def _trained(model: TrainedModel) -> Iterator[Parameter]:
    return (param for chunk in model.chunks for param in chunk.parameters() if param.requires_grad)


def _replicas(model: TrainedModel, param: Parameter) -> dist.ProcessGroup:
    """Ranks with a copy of the weight."""
    collection = model.model.groups.collection
    return collection.dp if getattr(param, "allreduce", True) else collection.expt_dp


def _pieces(model: TrainedModel) -> Iterator[tuple[Parameter, tuple[slice, dict[str, Tensor]]]]:
    """Yield weights, their flat elements here, and optimizer state."""
    for optimizer in model.optimizer.chained_optimizers:
        inner = optimizer.optimizer
        if hasattr(optimizer, "gbuf_ranges"):
            for param, (group, order) in optimizer.model_param_group_index_map.items():
                share = optimizer._get_model_param_range_map(param)["param"]
                yield param, (slice(share.start, share.end), _parts(param, inner.param_groups[group]["params"][order], inner))
        else:
            for param in _trained(model):
                main = getattr(param, "main_param", param)
                if main in inner.state:
                    yield param, (slice(0, param.numel()), _parts(param, main, inner))


def _parts(param: Parameter, main: Tensor, optimizer: Any) -> dict[str, Tensor]:
    """Return the moments, and `main` if it is a float32 copy."""
    parts = {moment: optimizer.state[main][moment] for moment in MOMENTS}
    return parts if param.dtype == torch.float32 else parts | {MASTER: main.data}
