"""bfloat16 computes, float32 remembers: small updates add up, and decoding rounds as training does."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from oppo_megatron.layout.memory import WHOLE_MULTIPLE, training_kernel_bytes
from tests.gloo.conftest import save_small
from tests.gloo.test_training import DATA
from tests.support.hf import tiny_model
from tests.support.ranks import run_ranks

NUM_STEPS = 25
JOBS = "tests.gloo.jobs_precision:"
MINIBATCH = DATA[1]
LAYOUTS = [(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 1, 2)]


@cache
def distance_in_one_process(directory: str) -> float:
    job = {"directory": directory, "data": MINIBATCH, "num_steps": NUM_STEPS}
    ((moved, _),) = run_ranks(1, f"{JOBS}small_updates", tp=1, pp=1, **job)
    return float(moved)


@pytest.mark.parametrize(
    ("tp", "pp", "dp"), [pytest.param(*layout, marks=[] if layout == LAYOUTS[1] else [pytest.mark.long]) for layout in LAYOUTS]
)
def test_updates_of_a_ten_thousandth_add_up(models: dict[str, str], tp: int, pp: int, dp: int) -> None:
    """Equals plain AdamW on float32 weights, number by number where a rank's shares are comparable; else as far in all."""
    job = {"directory": models["qwen3"], "data": MINIBATCH, "num_steps": NUM_STEPS}
    moved = distance_in_one_process(models["qwen3"])
    for distance, apart in run_ranks(tp * pp * dp, f"{JOBS}small_updates", tp=tp, pp=pp, **job):
        assert distance == pytest.approx(moved, rel=0.003)
        assert (apart is None) == (tp * pp > 1)
        assert apart is None or apart < 0.02


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def test_decoding_rounds_as_training_does(tmp_path: Path) -> None:
    """Biases are added before the product is rounded in both: else the gap would be as large as bfloat16's own error."""
    save_small(tmp_path, "qwen2", hidden_size=32)
    assert tiny_model("qwen2").model.layers[0].self_attn.q_proj.bias.abs().max() > 0.1
    dice = random.Random(2)
    probes = [[dice.randrange(1, 64) for _ in range(length)] for length in (32, 20, 7)]
    (found,) = run_ranks(1, f"{JOBS}forwards", directory=str(tmp_path), probes=probes)
    error = rms(found["training"] - found["exact"])
    assert 0 < rms(found["decode"] - found["training"]) < 0.5 * error
    assert rms(found["decode"] - found["exact"]) < 1.2 * error


def test_whole_sequences_in_bfloat16_come_in_few_sizes(tmp_path: Path) -> None:
    """The library makes, and keeps, kernels for each size; their plan counts so many."""
    save_small(tmp_path, "qwen2", hidden_size=32)
    probes = [list(range(1, 1 + length)) for length in (3, 20, 31)]
    (seen,) = run_ranks(1, f"{JOBS}rows_computed", directory=str(tmp_path), probes=probes)
    assert seen == {"bfloat16": {WHOLE_MULTIPLE}, "float32": {3, 20, 31}}
    assert training_kernel_bytes(65) == 2 * training_kernel_bytes(WHOLE_MULTIPLE) == 2 * 15 * 2**20
