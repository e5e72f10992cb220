"""The arithmetic of `--dry-run` against models that are really built."""

from __future__ import annotations

from typing import Any

import pytest

from oppo_megatron.config.model import ParallelConfig, TrainingLayoutConfig
from oppo_megatron.layout.activations import Model, TrainingBatch, kept_activations
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.memory import kv_cache_bytes, stage_layers, stage_parameters, training_state
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
            assert cache == kv_cache_bytes(shape, layout, "float32", slots=3, context=16, budget_mb=None)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_estimate_of_activations_is_near_what_a_forward_pass_keeps(recompute: str) -> None:
    layers, lengths = 16, [50] * 8
    shape = tiny_config("qwen2", hidden_size=64, intermediate_size=176, num_hidden_layers=layers).to_dict()
    (kept,) = run_ranks(
        1, "tests.gloo.jobs_memory:kept_for_backward", hf_config=shape, lengths=lengths, recompute=recompute
    )

    model, train = Model(shape, 1, "float32", scalar=True, on_cpu=True), TrainingLayoutConfig(recompute=recompute)
    expected = kept_activations(model, Sizes(), 0, train, TrainingBatch(400, 400))
    assert 0.8 < kept / expected < 1.25, (kept, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dp", [1, 2])
def test_training_state_is_what_the_optimizer_holds(dtype: str, dp: int) -> None:
    """Shards are padded and need not be equal: together they hold what is counted, within a part in a hundred."""
    shape = tiny_config("qwen2", vocab_size=512).to_dict()
    job = {"hf_config": shape, "dtype": dtype, "dp": dp}
    found = run_ranks(dp, "tests.gloo.jobs_memory:training_bytes", **job)
    parameters = stage_parameters(shape, 1, 1, 0, scalar=True)
    expected = training_state(parameters, dtype, dp)
    assert all(gradients == pytest.approx(expected.gradients, rel=0.01) for gradients, _ in found)
    assert sum(state for _, state in found) / dp == pytest.approx(expected.optimizer, rel=0.01)
