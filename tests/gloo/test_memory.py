"""The arithmetic of `--dry-run` against models that are really built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from oppo_megatron.config.model import ParallelConfig, TrainingLayoutConfig
from oppo_megatron.layout.hf_layout import Head
from oppo_megatron.layout.memory import stage_layers, stage_parameters
from oppo_megatron.layout.shape import ModelShape, kv_bytes_per_token
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.mcore.model import build_chunks, build_model
from tests.support.hf import tiny_config
from tests.support.ranks import run_ranks

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


CASES: list[tuple[dict[str, Any], str]] = [
    (tiny_config(family, tie_word_embeddings=tied).to_dict(), head)
    for family in ("llama", "qwen2", "qwen3")
    for tied in (False, True)
    for head in ("lm", "scalar")
]


@pytest.mark.parametrize(("tp", "pp", "vpp"), [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)])
def test_counts_equal_those_of_the_real_model(tp: int, pp: int, vpp: int) -> None:
    for rank_counts in run_ranks(tp * pp, "tests.gloo.test_memory:counts", cases=CASES, tp=tp, pp=pp, vpp=vpp):
        for (shape, head), (stage, parameters, layers, cache) in zip(CASES, rank_counts, strict=True):
            assert parameters == stage_parameters(shape, tp, pp, stage, scalar=head == "scalar"), (shape, head, stage)
            assert layers == [layer for chunk in stage_layers(shape, pp, stage, vpp) for layer in chunk]
            layout = ParallelConfig(tp=tp, pp=pp)
            assert cache == 3 * 16 * kv_bytes_per_token(shape, layout, "float32")
