"""`oppo bench gpu` on a CPU: every part of it but the device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peers.comparison import PEER_PYTHON
from oppo_megatron.bench.gpu import SHARES, SIZES, GpuBench, GpuWork, agenda, run_within, set_side_by_side
from oppo_megatron.cli.main import main
from oppo_megatron.data.generated import write_random_prompts
from oppo_megatron.errors import ConfigError
from oppo_megatron.integrations.huggingface import write_random_checkpoint
from oppo_megatron.layout.shape import check_model
from tests.support.processes import runs

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

ROOT = Path(__file__).resolve().parents[2]
TRL = ROOT / "benchmarks/peers/compare.py", ROOT / PEER_PYTHON


def quiet(text: str) -> None:
    """Says nothing."""


@pytest.mark.long
def test_every_part_gives_its_figures(tmp_path: Path) -> None:
    bench = GpuBench(tmp_path, WORK, 400.0, memory_bytes=2**40, trl=TRL, say=quiet)
    figures = bench.run({"tiny": {**TINY, "vocab_size": 512}})
    assert json.loads((tmp_path / "gpu.json").read_text())["results"] == json.loads(json.dumps(figures["results"]))
    rows = {(row["part"], row.get("variant"), row.get("long_tail", False)): row for row in figures["results"]}
    why_not = [row["why_not"] for row in figures["results"] if "why_not" in row]
    assert not why_not or (not TRL[1].is_file() and "make bench-trl" in why_not[0] and len(why_not) == 1), why_not
    for variant in ("as trained", "each token read", "transformers generate"):  # as trained it is dense already
        row = rows["decode", variant, False]
        assert row["tokens"] == 4 * 6 and row["steps"] == 6 and 0 < row["share_percent"] < 100
    tail = rows["decode", "as trained", True]
    assert tail["steps"] > 12 and 4 <= tail["tokens"] < 4 * tail["steps"]
    overlap = rows["overlap", "second stream", False]
    assert overlap["both_s"] > 0 and overlap["hidden_percent"] <= 100
    for mode in ("sequential", "full"):
        assert len(rows["ppo", mode, False]["steps"]) == WORK.ppo_steps and rows["ppo", mode, False]["step_s"] > 0
    if TRL[1].is_file():
        peer, ours = rows["ppo", "TRL", False], rows["ppo", "full", False]
        assert peer["rows"] == 4 and len(peer["steps"]) == 2 and 0 < peer["train_s"] < peer["step_s"]
        assert ours["times_trl"] == pytest.approx(ours["tokens_per_s"] / peer["tokens_per_s"])
        assert not (tmp_path / "tiny/trl/models").exists()
    with pytest.raises(ConfigError, match="not overwritten"):
        bench.run({"tiny": TINY})


@pytest.mark.long
def test_parts_that_fail_or_have_no_time_say_so_and_leave_the_others_alone(tmp_path: Path) -> None:
    bench = GpuBench(tmp_path, WORK, 30.0, memory_bytes=2**10, say=quiet)
    figures = bench.run({"broken": {**TINY, "hidden_size": "wide"}})
    why = {(row["part"], row.get("variant")): row["why_not"] for row in figures["results"] if "why_not" in row}
    assert len(why) == 5, figures["results"]
    assert "s left, fewer than" in why["decode", None] or "exit code 1" in why["decode", None]
    assert "repository's root" in why["ppo", "TRL"]


def test_of_the_first_size_all_is_measured_before_any_other(tmp_path: Path) -> None:
    plan = agenda(["a", "b", "c"])
    assert plan[: len(SHARES)] == [("a", part) for part in SHARES] and sum(SHARES.values()) <= 1
    assert plan[len(SHARES) :][:4] == [("b", "decode"), ("b", "overlap"), ("c", "decode"), ("c", "overlap")]
    assert sorted(plan) == sorted((size, part) for size in "abc" for part in SHARES)
    told: list[str] = []
    figures = GpuBench(tmp_path, WORK, 1.0, None, say=told.append).run({"a": TINY, "b": TINY})
    assert len(figures["results"]) == 2 * len(SHARES) and all("why_not" in row for row in figures["results"])
    assert len(told) >= 2 * len(SHARES)


def test_the_time_of_a_trl_that_is_absent_goes_to_the_other_parts(tmp_path: Path) -> None:
    given: dict[str, float] = {}

    class Noting(GpuBench):
        def _measure(self, size: str, part: str, shape: Any, inputs: Any, seconds: float) -> None:
            given[part] = seconds

    found = tmp_path / "python"
    found.write_text("#!/bin/sh\nexit 0\n")
    found.chmod(0o755)
    for number, python in enumerate((Path(sys.executable), tmp_path / "none", found)):
        Noting(tmp_path / f"{number}", WORK, 1000.0, None, (TRL[0], python), quiet).run({"a": TINY})
        expected = SHARES["decode"] * (1000.0 if python == found else 1000.0 / (1 - SHARES["trl"]))
        assert given["decode"] == pytest.approx(expected), python


def test_what_a_process_has_started_ends_with_it(tmp_path: Path) -> None:
    """A session of its own, as torch's elastic launcher starts ranks, would go on holding the device's memory."""
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
    child += "start_new_session=True); print(p.pid, flush=True); time.sleep(60)"
    log = tmp_path / "log"
    for _ in (outcomes := run_within([sys.executable, "-c", child], 50.0, log)):
        if log.read_text().strip():
            break
    pid = int(log.read_text())
    assert runs(pid)
    outcomes.close()
    assert not runs(pid)


def test_ppo_runs_are_set_beside_ours_in_sequence_and_trl() -> None:
    rates = {"sequential": 100.0, "full": 150.0, "TRL": 25.0}
    rows = [{"size": "a", "part": "ppo", "variant": v, "tokens_per_s": r, "steps": []} for v, r in rates.items()]
    rows += [{"size": "b", "part": "ppo", "variant": "full", "tokens_per_s": 1.0, "steps": []}]
    rows += [{"size": "a", "part": "ppo", "variant": "TRL", "why_not": "no memory"}]
    set_side_by_side(rows)
    assert [(row.get("times_sequential"), row.get("times_trl")) for row in rows] == [
        (1.0, 4.0), (1.5, 6.0), (0.25, 1.0), (None, None), (None, None),
    ]  # fmt: skip


def test_shapes_are_ones_that_the_runtime_computes() -> None:
    for size, shape in SIZES.items():
        assert not check_model(size, shape)


def test_a_run_that_the_device_cannot_hold_is_left_out(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_random_checkpoint({**TINY, "vocab_size": 512}, checkpoint, torch.float32, torch.device("cpu"))
    inputs = write_random_prompts(tmp_path / "inputs", WORK.prompt_tokens)
    for memory_bytes, lacks in ((2.0**10, True), (2.0**40, False), (None, False)):
        bench = GpuBench(tmp_path, WORK, 30.0, memory_bytes, say=quiet)
        lacking = bench.lacking(bench.ppo_run(tmp_path, "full", *inputs))
        assert (lacking is not None and lacking.startswith("needs about 0 GiB")) == lacks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "measures a CUDA device, but torch" in said and "finds none; run it on a machine with" in said
