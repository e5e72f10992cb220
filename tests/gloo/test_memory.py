"""The arithmetic of `--dry-run` against models that are really built."""

from __future__ import annotations

from typing import Any

import pytest

from oppo_megatron.config.model import ParallelConfig
from oppo_megatron.layout.memory import stage_layers, stage_parameters
from oppo_megatron.layout.shape import kv_bytes_per_token
from tests.support.hf import tiny_config
from tests.support.ranks import run_ranks

CASES: list[tuple[dict[str, Any], str]] = [
    (tiny_config(family, tie_word_embeddings=tied).to_dict(), head)
    for family in ("llama", "qwen2", "qwen3")
    for tied in (False, True)
    for head in ("lm", "scalar")
]


@pytest.mark.parametrize(("tp", "pp", "vpp"), [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)])
def test_counts_equal_those_of_the_real_model(tp: int, pp: int, vpp: int) -> None:
    for rank_counts in run_ranks(tp * pp, "tests.gloo.jobs_memory:counts", cases=CASES, tp=tp, pp=pp, vpp=vpp):
        for (shape, head), (stage, parameters, layers, cache) in zip(CASES, rank_counts, strict=True):
            assert parameters == stage_parameters(shape, tp, pp, stage, scalar=head == "scalar"), (shape, head, stage)
            assert layers == [layer for chunk in stage_layers(shape, pp, stage, vpp) for layer in chunk]
            layout = ParallelConfig(tp=tp, pp=pp)
            assert cache == 3 * 16 * kv_bytes_per_token(shape, layout, "float32")
