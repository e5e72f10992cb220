"""What each rank does in the tests of memory: it builds its share of a model and counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.config.model import OptimizerConfig, TrainingLayoutConfig
from oppo_megatron.layout.model_shape import ModelShape
from oppo_megatron.mcore.attention import PackedPlan
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.mcore.model import Head, build_chunks, build_model
from oppo_megatron.mcore.training import TrainedModel

Count = tuple[int, int, list[int], int]
"""(stage, parameters, numbers of the layers, bytes of a KV cache of 3 slots)"""


def counts(cases: list[tuple[dict[str, Any], Head]], tp: int, pp: int, vpp: int) -> list[Count]:
    """Of each (config.json, head): what this rank holds when the job's ranks share the model."""
    groups = build_groups(range(dist.get_world_size()), tp, pp, "model")
    assert groups is not None
    found = []
    for hf_config, head in cases:
        made: dict[str, Any] = {"head": head, "max_length": 16, "dtype": "float32", "device": torch.device("cpu")}
        shape = ModelShape.from_hf(hf_config)
        chunks = build_chunks(shape, groups, TrainingLayoutConfig(vpp=vpp), **made)
        number = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        layers = [layer.layer_number - 1 for chunk in chunks for layer in chunk.decoder.layers]
        cache = build_model(shape, groups, **made).new_cache(3)
        found.append((groups.pp_rank, number, layers, sum(t.nbytes for t in (*cache.k, *cache.v))))
    return found


def kept_for_backward(hf_config: dict[str, Any], lengths: list[int], recompute: str) -> int:
    """Bytes of activations that a forward pass of one micro-batch leaves behind, each storage once."""
    groups = build_groups([0], 1, 1, "model")
    assert groups is not None
    layout = TrainingLayoutConfig(recompute=recompute)
    shape, device = ModelShape.from_hf(hf_config), torch.device("cpu")
    (model,) = build_chunks(shape, groups, layout, head="scalar", max_length=64, dtype="float32", device=device)
    model.train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.zeros(sum(lengths), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, PackedPlan(lengths, model.rope))
    return sum(storage.nbytes() for storage in kept.values())


def training_bytes(hf_config: dict[str, Any], dtype: str, dp: int) -> tuple[int, int]:
    """Bytes of main gradients, and of Adam's state with the weights it keeps for itself, after an optimizer step."""
    groups = build_groups(range(dist.get_world_size()), 1, 1, "model")
    assert groups is not None and groups.dp == dp
    layout = TrainingLayoutConfig()
    shape, device = ModelShape.from_hf(hf_config), torch.device("cpu")
    chunks = build_chunks(shape, groups, layout, head="scalar", max_length=16, dtype=dtype, device=device)
    trained = TrainedModel(chunks, OptimizerConfig(lr=1e-4), total_steps=1, layout=layout)
    trained.optimizer.zero_grad()
    trained.optimizer.step()
    gradients = sum(buffer.grad_data.nbytes for ddp in trained.ddp for buffer in ddp.buffers)
    weights = {p.untyped_storage().data_ptr() for chunk in chunks for p in chunk.parameters()}
    adam = trained.optimizer.optimizer
    assert all(group["fused"] for group in adam.param_groups), "one pass, whatever the precision and the replicas"
    own = [p for group in adam.param_groups for p in group["params"]]
    state = [value for moments in adam.state.values() for value in moments.values() if value.numel() > 1]
    held = [tensor for tensor in (*own, *state) if tensor.untyped_storage().data_ptr() not in weights]
    return gradients, sum(tensor.numel() * tensor.element_size() for tensor in held)
