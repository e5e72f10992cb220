"""`oppo bench gpu` on a CPU: every part of it but the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from oppo_megatron.bench.gpu import SIZES, GpuBench, GpuWork
from oppo_megatron.cli.main import main
from oppo_megatron.config.shape import check_model
from oppo_megatron.data.random_prompts import write_random_prompts
from oppo_megatron.integrations.huggingface import write_random_checkpoint

TINY = {**SIZES["0.5B"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WORK = GpuWork(
    batch=4,
    prompt_tokens=6,
    response_tokens=48,
    median=12.0,
    chunk_tokens=3,
    steady_steps=6,
    delta=2,
    micro_batch_tokens=256,
    dtype="float32",
    device="cpu",
)


@pytest.mark.long
def test_every_part_gives_its_figures(tmp_path: Path) -> None:
    bench = GpuBench(tmp_path, WORK, 400.0, memory_bytes=2**40, say=lambda text: None)
    figures = bench.run({"tiny": {**TINY, "vocab_size": 512}})
    assert json.loads((tmp_path / "gpu.json").read_text())["results"] == json.loads(json.dumps(figures["results"]))
    rows = {(row["part"], row.get("variant"), row.get("long_tail", False)): row for row in figures["results"]}
    assert not [row["why_not"] for row in figures["results"] if "why_not" in row]
    for variant in ("as trained", "dense cache", "each token read", "transformers generate"):
        row = rows["decode", variant, False]
        assert row["tokens"] == 4 * 6 and row["steps"] == 6 and 0 < row["share_percent"] < 100
    tail = rows["decode", "as trained", True]
    assert tail["steps"] > 12 and 4 <= tail["tokens"] < 4 * tail["steps"]
    overlap = rows["overlap", "second stream", False]
    assert overlap["both_s"] > 0 and overlap["hidden_percent"] <= 100
    for mode in ("sequential", "full"):
        assert len(rows["ppo", mode, False]["steps"]) == WORK.ppo_steps and rows["ppo", mode, False]["step_s"] > 0


@pytest.mark.long
def test_parts_that_fail_or_have_no_time_say_so_and_leave_the_others_alone(tmp_path: Path) -> None:
    bench = GpuBench(tmp_path, WORK, 30.0, memory_bytes=2**10, say=lambda text: None)
    figures = bench.run({"broken": {**TINY, "hidden_size": "wide"}})
    why = {(row["part"], row.get("variant")): row["why_not"] for row in figures["results"] if "why_not" in row}
    assert len(why) == 4, figures["results"]
    assert "exit code 1" in why["decode", None] and "decode.log" in why["decode", None]
    assert "s left, fewer than" in why["overlap", None] or "exit code" in why["overlap", None]


def test_shapes_are_ones_that_the_runtime_computes() -> None:
    for size, shape in SIZES.items():
        assert not check_model(size, shape)


def test_a_run_that_the_device_cannot_hold_is_left_out(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_random_checkpoint({**TINY, "vocab_size": 512}, checkpoint, torch.float32, torch.device("cpu"))
    tokenizer, prompts = write_random_prompts(tmp_path / "inputs", WORK.prompt_tokens)
    for memory_bytes, lacks in ((2.0**10, True), (2.0**40, False), (None, False)):
        bench = GpuBench(tmp_path, WORK, 30.0, memory_bytes, say=lambda text: None)
        lacking = bench.lacking(bench.ppo_run(tmp_path / "run", "full", checkpoint, tokenizer, prompts))
        assert (lacking is not None and lacking.startswith("needs about 0 GiB")) == lacks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "measures a CUDA device, but torch" in said and "finds none; run it on a machine with" in said
