"""oppo bench on tiny runs and on a CPU, and the comparison with TRL from end to end, where its environment has been made."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.limit import limits
from benchmarks.peers.comparison import PEER_PYTHON
from benchmarks.peers.comparison import main as compare
from oppo_megatron.bench.decode import DecodeWork, available_peers
from oppo_megatron.bench.gpu import SHARES, SIZES, GpuBench, GpuWork, agenda, run_within, set_side_by_side
from oppo_megatron.bench.suite import Suite, bare, bench_overlap
from oppo_megatron.cli.launch import launch
from oppo_megatron.cli.main import main
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.generated import write_random_prompts
from oppo_megatron.errors import ConfigError
from oppo_megatron.integrations.huggingface import write_random_checkpoint
from oppo_megatron.layout.shape import check_model
from tests.support.ppo import Workspace
from tests.support.processes import runs

Capture = pytest.CaptureFixture[str]
LENGTHS = {"rollout.forced_lengths": [12, 0.7], "rollout.max_response_tokens": 24}
OVERLAPS = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 2, "max": 2}}


def config(workspace: Workspace, **changes: Any) -> TrainConfig:
    return bare(TrainConfig(**workspace.config("bench", **{**LENGTHS, **OVERLAPS, "steps": 2, **changes})))


def suite(out: Path, repeats: int = 1) -> Suite:
    return Suite(out, repeats, launch, say=lambda _: None)


def left(out: Path, kind: str) -> dict[str, Any]:
    written = json.loads((out / f"{kind}.json").read_text())
    assert written["bench"] == kind and written["machine"]["usable_cores"] >= 1
    assert written["config"]["rollout"]["max_response_tokens"] == 24
    pictures = list(out.glob("*.png"))
    assert pictures and all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    return written


@pytest.mark.long
def test_overlap_by_the_command(workspace: Workspace, tmp_path: Path, capfd: Capture) -> None:
    path, out = tmp_path / "config.yaml", tmp_path / "out"
    pair = {"placement.mode": "disaggregated", "rewards": [{"kind": "model"}]}
    plain = workspace.config("cli", **{**LENGTHS, **OVERLAPS, **pair, "logging.rollouts": True})
    path.write_text(yaml.safe_dump(plain))
    arguments = ["--modes", "sequential,full+critic", "--steps", "3", "--prompt-tokens", "16", "--cores", "1"]
    assert main(["bench", "overlap", str(path), *arguments, "--out", str(out)]) == 0
    said = capfd.readouterr().out
    for words in ("the same work: ", "x best", "best sequential placement: pair", "a step without waiting"):
        assert words in said
    assert "--- pair/full+critic, run 1 of 1 (2 of 2)" in said

    written = left(out, "overlap")
    rows = {row["mode"]: row for row in written["results"]}
    assert rows["sequential"]["tokens"] == rows["full+critic"]["tokens"] and written["same_work"]
    assert rows["sequential"]["score_exposed_percent"] > rows["full+critic"]["score_exposed_percent"]
    assert {len(run["steps"]) for runs in written["runs"].values() for run in runs} == {3}
    for ranks in written["utilization"].values():
        assert [rank["rank"] for rank in ranks] == [0, 1]
        assert all(sum(rank[kind] for kind in ("decode", "score", "update", "idle")) == pytest.approx(100) for rank in ranks)
        assert ranks[0]["decode"] > 0 and ranks[0]["score"] == 0 and ranks[1]["score"] > 0 and ranks[1]["update"] > 0
    (out / "utilization.png").stat()
    rows, peaks = limits([out / "pair" / f"{mode}-1" for mode in ("sequential", "full+critic")])
    assert len(peaks) == 1
    for limit in rows:
        assert limit["over_least"] > 1, "no run beats its least time"
        assert limit["least_s"] == pytest.approx(limit["decode_s"] + limit["score_s"] + limit["train_s"])


def test_overlap_where_roles_share_a_process(workspace: Workspace, tmp_path: Path) -> None:
    modes = ["sequential", "full+backfill"]
    result = bench_overlap(suite(tmp_path, repeats=2), config(workspace, steps=1), modes, ["single"], cores=1)
    for run in ("single/sequential-1", "single/full+backfill-2"):
        assert (tmp_path / run / "summary.json").exists() and not (tmp_path / run / "weights").exists()
    [rank] = result["nothing_waits"][0]["ranks"]
    assert 0 < rank["step_s"] <= rank["total_s"] and result["best_sequential"]["step_s"] == "single"
    written = left(tmp_path, "overlap")
    assert {name: len(runs) for name, runs in written["runs"].items()} == {"single/sequential": 2, "single/full+backfill": 2}


GROUPS: dict[str, Any] = {
    "critic": None, "reward": None, "ppo": {"minibatches": 1}, "steps": 1,
    "rewards": [{"kind": "verifier", "name": "arithmetic"}], "rollout.batch_size": 8, "rollout.group_size": 4,
    "overlap.delta": {"rule": "fixed", "initial": 1, "max": 1},
}  # fmt: skip


@pytest.mark.long
def test_overlap_without_a_model_that_scores(workspace: Workspace, tmp_path: Path) -> None:
    base = config(workspace, **GROUPS, algorithm={"preset": "dapo"})
    assert base.filter is not None
    said: list[str] = []
    result = bench_overlap(Suite(tmp_path, 1, launch, said.append), base, ["sequential", "full"], ["single"], cores=1)
    assert sum("without the filter" in line for line in said) == 1
    written = left(tmp_path, "overlap")
    assert [row["score_exposed_percent"] for row in written["results"]] == [None, None] and result["same_work"]


WORDS = "--hidden 64 --layers 2 --heads 4 --kv-heads 2 --ffn 128 --vocab 200 --prompt 6 --new 8 --repeats 1".split()


def test_all_peers_decode_the_same_tokens(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "folder"
    assert main(["bench", "decode", *WORDS, "--batch", "1,3", "--out", str(out)]) == 0
    rows = json.loads((out / "decode.json").read_text())["results"]
    assert [row["peer"] for row in rows] == available_peers() * 2
    for row in rows:
        assert row["tokens_per_s"] >= row["min"] > 0
        assert row["same_tokens"] == (None if row["peer"] == "ours-engine" else 1.0), row
    assert "x bare-packed" in capsys.readouterr().out and (out / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_in_bfloat16_the_bare_loop_and_ours_agree(tmp_path: Path) -> None:
    arguments = ["--batch", "2", "--dtype", "bfloat16", "--peers", "bare,ours-fused,ours-module", "--out", str(tmp_path)]
    assert main(["bench", "decode", *WORDS, *arguments]) == 0
    assert all(row["same_tokens"] >= 0.9 for row in json.loads((tmp_path / "decode.json").read_text())["results"])


@pytest.mark.long
def test_sequences_end_at_the_given_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,GeneratedTokens\n" + "".join(f"0,{length}\n" for length in (1, 2, 3, 4, 9)))
    arguments = ["--batch", "4", "--trace", str(trace), "--peers", "bare,ours-packed,ours-engine"]
    assert main(["bench", "decode", *WORDS, *arguments, "--out", str(tmp_path)]) == 0
    bare, packed, _ = json.loads((tmp_path / "decode.json").read_text())["results"]
    assert bare["same_tokens"] == packed["same_tokens"] == 1.0

    stopping = DecodeWork({}, [4], 6, 8, 1, 1, forced_lengths={"forced_lengths": str(trace)}).stopping
    assert {stopping.limit(i) - 1 for i in range(200)} == {1, 2, 3, 4, 8}, "the trace's, cut at --new"


@pytest.mark.parametrize(("arguments", "reason"), [
    (["--trace", "none.csv"], "none.csv"), (["--lognormal", "0,1"], "median"), (["--trace-column", "x"], "give --trace, too"),
    (["--peers", "bare,none"], "['none']"), (["--out", __file__], f"{__file__}: File exists"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused_at_once(arguments: list[str], reason: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    assert main(["bench", "decode", *WORDS, "--out", str(out), *arguments]) == 2
    assert reason in capsys.readouterr().err and not out.exists()


TINY = {**SIZES["0.5B"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WORK = GpuWork(
    batch=4, prompt_tokens=6, response_tokens=48, median=12.0, chunk_tokens=3, steady_steps=6, delta=2, micro_batch_tokens=256,
    dtype="float32", device="cpu",
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
TRL = ROOT / "benchmarks/peers/compare.py", ROOT / PEER_PYTHON


@pytest.mark.long
def test_every_part_gives_its_figures(tmp_path: Path) -> None:
    bench = GpuBench(tmp_path, WORK, 400.0, memory_bytes=2**40, trl=TRL, say=lambda _: None)
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
    bench = GpuBench(tmp_path, WORK, 30.0, memory_bytes=2**10, say=lambda _: None)
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
        Noting(tmp_path / f"{number}", WORK, 1000.0, None, (TRL[0], python), lambda _: None).run({"a": TINY})
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
        bench = GpuBench(tmp_path, WORK, 30.0, memory_bytes, say=lambda _: None)
        lacking = bench.lacking(bench.ppo_run(tmp_path, "full", *inputs))
        assert (lacking is not None and lacking.startswith("needs about 0 GiB")) == lacks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_gpu_it_says_what_it_needs(capsys: Capture) -> None:
    assert main(["bench", "gpu"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "measures a CUDA device, but torch" in said and "finds none; run it on a machine with" in said


WITH_TRL = pytest.mark.skipif(
    not (ROOT / PEER_PYTHON).is_file(),
    reason=f"no {PEER_PYTHON}: `make bench-trl` creates it; TRL is installed for this comparison only",
)


def compared(workspace: Workspace, out: Path, capsys: Capture, settings: dict[str, Any], *options: str) -> tuple[str, Any, Any]:
    """Return the printed text, the record, and the steps of TRL, whose responses have the same lengths."""
    config = out.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(workspace.config("base", **settings)), encoding="utf-8")
    usual = ["--threads", "1", "--placements", "single", "--peer-python", str(ROOT / PEER_PYTHON), "--out", str(out)]
    assert compare([str(config), *usual, *options]) == 0, capsys.readouterr().err
    printed, found = capsys.readouterr().out, json.loads((out / "trl.json").read_text())
    assert [row["run"] for row in found["results"]] == ["TRL", "single-sequential", "single-full"]
    work, (steps,) = json.loads((out / "work.json").read_text()), found["trl"]
    assert [length for step in steps for length in step["response_tokens"]] == work["lengths"]
    return printed, found, steps


@WITH_TRL
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trl_does_the_same_work(workspace: Workspace, tmp_path: Path, capsys: Capture, dtype: str) -> None:
    settings: dict[str, Any] = {
        "rewards": [{"kind": "model"}], "rollout.forced_lengths": [10, 0.8], "ppo.entropy_coefficient": 0.0,
        "overlap.delta": {"rule": "fixed", "initial": 2, "max": 2}, "runtime": {"device": "cpu"},
    }  # fmt: skip
    out = tmp_path / "out"
    printed, found, steps = compared(workspace, out, capsys, settings, "--modes", "sequential,full", "--dtype", dtype)
    assert "equal work" in printed
    work = json.loads((out / "work.json").read_text())
    assert [step["ended_by_eos"] for step in steps] == [work["batch_size"]] * work["steps"]
    assert len({tuple(step["prompt_tokens"]) for step in steps}) == len(steps), "prompts differ in length"
    # The same weights score other samples: rewards are of the same size, not equal.
    first = found["ours"]["single-sequential"][0][0]
    assert abs(steps[0]["reward_mean"] - first["reward_mean"]) < 3 * first["reward_std"] + 0.1
    assert (out / "trl.png").is_file()


@WITH_TRL
@pytest.mark.parametrize("kl", ["loss", "none"])
def test_trl_and_ours_train_groups_alike(workspace: Workspace, tmp_path: Path, capsys: Capture, kl: str) -> None:
    settings: dict[str, Any] = {
        "algorithm": {"preset": "grpo"}, "critic": None, "reward": None, "runtime": {"device": "cpu"},
        "rewards": [{"kind": "verifier", "name": "length", "buffer_tokens": 12}], "rollout.forced_lengths": [10, 0.8],
        "rollout": {"batch_size": 8, "group_size": 4, "max_response_tokens": 24}, "ppo": {"kl": {"mode": kl}},
        "overlap.delta": {"rule": "fixed", "initial": 1, "max": 1},
    }  # fmt: skip
    printed, found, steps = compared(workspace, tmp_path / "out", capsys, settings, "--trl-micro-batch", "4")
    assert f"KL: beta {0.04 if kl == 'loss' else 0:g} on both sides" in printed
    assert len({step["reward_mean"] for step in steps}) > 1 and all(step["score_s"] > 0 for step in steps)
    ours = found["ours"]["single-sequential"][0]
    assert [step["reward_mean"] for step in steps] == pytest.approx([line["reward_mean"] for line in ours], abs=1e-6)
