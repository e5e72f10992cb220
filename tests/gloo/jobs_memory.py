"""What each rank does in the tests of memory: it builds its share of a model and counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.config.model import TrainingLayoutConfig
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.model_shape import ModelShape
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.mcore.model import build_chunks, build_model

Count = tuple[int, int, list[int], int]
"""(stage, parameters, numbers of the layers, bytes of a KV cache of 3 slots)"""


def counts(cases: list[tuple[dict[str, Any], Head]], tp: int, pp: int, vpp: int) -> list[Count]:
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
