"""`oppo bench overlap` on tiny runs: its figures, and the files it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.limit import limits
from oppo_megatron.bench.decode import DecodeWork, available_peers
from oppo_megatron.bench.suite import Suite, bare, bench_overlap
from oppo_megatron.cli.launch import launch
from oppo_megatron.cli.main import main
from oppo_megatron.config.run import TrainConfig
from tests.support.ppo import Workspace

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
def test_overlap_by_the_command(workspace: Workspace, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "config.yaml", tmp_path / "out"
    pair = {"placement.mode": "disaggregated", "rewards": [{"kind": "model"}]}
    plain = workspace.config("cli", **{**LENGTHS, **OVERLAPS, **pair, "logging.rollouts": True})
    path.write_text(yaml.safe_dump(plain))
    arguments = ["--modes", "sequential,full+critic", "--steps", "3", "--prompt-tokens", "16", "--cores", "1"]
    assert main(["bench", "overlap", str(path), *arguments, "--out", str(out)]) == 0
    said = capfd.readouterr().out
    assert (
        "the same work: " in said
        and "x best" in said
        and "best sequential placement: pair" in said
        and "a step without waiting" in said
    )
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
    result = bench_overlap(
        suite(tmp_path, repeats=2), config(workspace, steps=1), ["sequential", "full+backfill"], ["single"], cores=1
    )
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
"""Without a critic."""


@pytest.mark.long
def test_overlap_without_a_model_that_scores(workspace: Workspace, tmp_path: Path) -> None:
    base = config(workspace, **GROUPS, algorithm={"preset": "dapo"})
    assert base.filter is not None
    said: list[str] = []
    result = bench_overlap(Suite(tmp_path, 1, launch, said.append), base, ["sequential", "full"], ["single"], cores=1)
    assert sum("without the filter" in line for line in said) == 1
    written = left(tmp_path, "overlap")
    assert [row["score_exposed_percent"] for row in written["results"]] == [None, None] and result["same_work"]


TINY = "--hidden 64 --layers 2 --heads 4 --kv-heads 2 --ffn 128 --vocab 200 --prompt 6 --new 8 --repeats 1".split()


def test_all_peers_decode_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "folder"
    assert main(["bench", "decode", *TINY, "--batch", "1,3", "--out", str(out)]) == 0
    rows = json.loads((out / "decode.json").read_text())["results"]
    assert [row["peer"] for row in rows] == available_peers() * 2
    for row in rows:
        assert row["tokens_per_s"] >= row["min"] > 0
        assert row["same_tokens"] == (None if row["peer"] == "ours-engine" else 1.0), row
    assert "x bare-packed" in capsys.readouterr().out
    assert (out / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_in_bfloat16_the_bare_loop_and_ours_agree(tmp_path: Path) -> None:
    arguments = ["--batch", "2", "--dtype", "bfloat16", "--peers", "bare,ours-fused,ours-module", "--out", str(tmp_path)]
    assert main(["bench", "decode", *TINY, *arguments]) == 0
    assert all(row["same_tokens"] >= 0.9 for row in json.loads((tmp_path / "decode.json").read_text())["results"])


@pytest.mark.long
def test_sequences_end_at_the_given_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,GeneratedTokens\n" + "".join(f"0,{length}\n" for length in (1, 2, 3, 4, 9)))
    arguments = ["--batch", "4", "--trace", str(trace), "--peers", "bare,ours-packed,ours-engine"]
    assert main(["bench", "decode", *TINY, *arguments, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "decode.json").read_text())
    bare, packed, _ = found["results"]
    assert bare["same_tokens"] == packed["same_tokens"] == 1.0

    stopping = DecodeWork({}, [4], 6, 8, 1, 1, forced_lengths={"forced_lengths": str(trace)}).stopping
    assert {stopping.limit(i) - 1 for i in range(200)} == {1, 2, 3, 4, 8}, "the trace's, cut at --new"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--trace", "none.csv"], "none.csv"),
        (["--lognormal", "0,1"], "median"),
        (["--trace-column", "x"], "give --trace, too"),
        (["--peers", "bare,none"], "['none']"),
        (["--out", __file__], f"{__file__}: File exists"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(
    arguments: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["bench", "decode", *TINY, "--out", str(out), *arguments]) == 2
    assert reason in capsys.readouterr().err and not out.exists()
