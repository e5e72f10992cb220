"""Every benchmark of whole runs on real, tiny ones: what it measures, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from oppo_megatron.bench.chunk import bench_chunk
from oppo_megatron.bench.delta import bench_delta
from oppo_megatron.bench.fork import bench_fork
from oppo_megatron.bench.overhead import bench_overhead
from oppo_megatron.bench.overlap import bench_overlap
from oppo_megatron.bench.rewards import bench_rewards
from oppo_megatron.bench.scaling import bench_scaling, make_axes
from oppo_megatron.bench.suite import Suite, bare
from oppo_megatron.bench.weave import bench_weave
from oppo_megatron.cli.launch import launch
from oppo_megatron.cli.main import main
from oppo_megatron.config.run import TrainConfig
from tests.support.ppo import Workspace

LENGTHS = {"debug.forced_lengths": [12, 0.7], "rollout.max_response_tokens": 24}
OVERLAPS = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 2, "max": 2}}

ONE_THREAD = {"runtime.threads_per_rank": 1}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("bench"))


def config(workspace: Workspace, **changes: Any) -> TrainConfig:
    """Tiny models in one process."""
    return bare(
        TrainConfig(**workspace.config("bench", **{**LENGTHS, **OVERLAPS, "steps": 2, **ONE_THREAD, **changes}))
    )


def suite(out: Path, repeats: int = 1) -> Suite:
    """Runs of one rank in this process, of several in processes of their own."""
    return Suite(out, repeats, launch, say=lambda _: None)


def left(out: Path, kind: str) -> dict[str, Any]:
    """What the benchmark wrote, its pictures looked at."""
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
    plain = workspace.config("cli", **{**LENGTHS, **OVERLAPS, **ONE_THREAD, **pair})
    path.write_text(yaml.safe_dump(plain))
    arguments = [
        "--modes",
        "sequential,full+critic",
        "--steps",
        "3",
        "--prompt-tokens",
        "16",
        "--limit",
        "--cores",
        "1",
    ]
    assert main(["bench", "overlap", str(path), *arguments, "--out", str(out)]) == 0
    said = capfd.readouterr().out
    assert (
        "the same work: " in said
        and "x best" in said
        and "best sequential placement: pair" in said
        and "a step in which nothing waits" in said
    )
    assert "--- pair/full+critic, run 1 of 1 (2 of 2)" in said and "GFLOP/s" in said

    written = left(out, "overlap")
    rows = {row["mode"]: row for row in written["results"]}
    assert rows["sequential"]["tokens"] == rows["full+critic"]["tokens"] and written["same_work"]
    assert rows["sequential"]["score_exposed_percent"] > rows["full+critic"]["score_exposed_percent"]
    assert {len(run["steps"]) for runs in written["runs"].values() for run in runs} == {3}
    for ranks in written["utilization"].values():
        assert [rank["rank"] for rank in ranks] == [0, 1]
        assert all(
            sum(rank[kind] for kind in ("decode", "score", "update", "idle")) == pytest.approx(100) for rank in ranks
        )
        assert ranks[0]["decode"] > 0 and ranks[0]["score"] == 0 and ranks[1]["score"] > 0 and ranks[1]["update"] > 0
    (out / "utilization.png").stat()
    for limit in written["limits"]:
        assert limit["threads"] == 1 and limit["over_least"] > 1, "no run beats its least time"
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
    assert {name: len(runs) for name, runs in written["runs"].items()} == {
        "single/sequential": 2,
        "single/full+backfill": 2,
    }


GROUPS: dict[str, Any] = {
    "critic": None, "reward": None, "ppo": {"minibatches": 1}, "steps": 1,
    "rewards": [{"kind": "verifier", "name": "arithmetic"}], "rollout.batch_size": 8, "rollout.group_size": 4,
    "overlap.delta": {"rule": "fixed", "initial": 1, "max": 1},
}  # fmt: skip
"""Without a critic."""


def test_fork(workspace: Workspace, tmp_path: Path) -> None:
    """What a fork saves is not prefilled, in the actor and in the reference, and by prompts of any length."""
    base = config(workspace, **GROUPS, algorithm={"preset": "grpo"})
    bench_fork(suite(tmp_path), {tokens: base for tokens in (16, 20)})
    rows = left(tmp_path, "fork")["results"]
    assert [(row["prompt_tokens"], row["fork"]) for row in rows] == [(16, "yes"), (16, "no"), (20, "yes"), (20, "no")]
    for forked, apart in (rows[:2], rows[2:]):
        assert apart["forked_tokens"] == 0 < forked["forked_tokens"]
        assert forked["prefilled_tokens"] + forked["forked_tokens"] == apart["prefilled_tokens"]
        assert forked["speedup_step_s"] == pytest.approx(apart["step_s"] / forked["step_s"])
        assert forked["min_step_s"] == forked["step_s"] == forked["max_step_s"], "one step"


def test_modes_by_kind_of_reward(workspace: Workspace, tmp_path: Path) -> None:
    base = config(workspace, **GROUPS, algorithm={"preset": "grpo"})
    bench_rewards(suite(tmp_path), base, ["verifier", "process"], ["sequential", "full"], ["single"], cores=1)
    written = left(tmp_path, "overlap")
    rows = [(row["reward"], row["mode"]) for row in written["results"]]
    assert rows == [(kind, mode) for kind in ("verifier", "process") for mode in ("sequential", "full")]
    assert all(row["best_step_s"] == row["speedup_step_s"] for row in written["results"]), "each kind has its own base"
    scored = {kind: found["results"][0]["score_busy_s"] for kind, found in written["rewards"].items()}
    assert min(scored.values()) > 0, "the reference reads under a verifier, too"
    assert {path.name for path in tmp_path.glob("*.png")} == {"overlap-verifier.png", "overlap-process.png"}


@pytest.mark.long
def test_overlap_without_a_model_that_scores(workspace: Workspace, tmp_path: Path) -> None:
    """The time that scoring takes is 0, so that it has no share, and the least time has none of it."""
    base = config(workspace, **GROUPS, algorithm={"preset": "dapo"})
    assert base.filter is not None
    said: list[str] = []
    result = bench_overlap(
        Suite(tmp_path, 1, launch, said.append), base, ["sequential", "full"], ["single"], cores=1, limit=True
    )
    assert sum("without the filter" in line for line in said) == 1
    written = left(tmp_path, "overlap")
    assert [row["score_exposed_percent"] for row in written["results"]] == [None, None] and result["same_work"]
    assert all(limit["score_s"] == 0 and limit["over_least"] > 1 for limit in written["limits"])


@pytest.mark.long
def test_weave(workspace: Workspace, tmp_path: Path) -> None:
    stages = {"placement": {"mode": "colocated", "actor": {"pp": 2}}}
    bench_weave(suite(tmp_path), config(workspace, **stages), ["sequential", "woven"])
    rows = left(tmp_path, "weave")["results"]
    assert [row["mode"] for row in rows] == ["sequential", "woven"]
    for row in rows:
        assert 0 < row["rounds_s"] <= row["step_s"] and len(row["bubble_by_rank"]) == 2
        assert 0 < row["bubble_percent"] < 100


@pytest.mark.long
def test_chunk(workspace: Workspace, tmp_path: Path) -> None:
    base = config(workspace, steps=4, **{"overlap.chunk": {"tokens": 4, "adaptive": [4, 8]}})
    result = bench_chunk(suite(tmp_path), base, [4, 8, 64], adaptive=True, limit_cores=1)
    assert [row["run"] for row in result["limits"]] == ["4", "8", "adaptive"]
    assert all(row["over_least"] > 1 for row in result["limits"]), "no run beats its least time"
    assert [row["chunk"] for row in left(tmp_path, "chunk")["results"]] == ["4", "8", "adaptive"]
    tuned = result["adaptive"]
    assert tuned["first_settled_step"] == 4 and tuned["settled_on"][0] in (4, 8) and tuned["best_fixed"] in (4, 8)
    lines = json.loads((tmp_path / "chunk.json").read_text())["runs"]["8"][0]["steps"]
    assert {line["chunk_tokens"] for line in lines} == {8}


@pytest.mark.long
def test_delta(workspace: Workspace, tmp_path: Path) -> None:
    base = config(workspace, **{"overlap.delta": {"initial": 1, "max": 2, "window": 1}}, steps=3)
    bench_delta(suite(tmp_path), base, [0, 2], ["eq4"])
    rows = {row["delta"]: row for row in left(tmp_path, "delta")["results"]}
    assert rows["fixed-0"]["carried"] == 0 and rows["fixed-0"]["stale_percent"] == 0
    assert rows["fixed-0"]["ess"] == pytest.approx(1, abs=1e-6)
    assert rows["fixed-2"]["carried"] > 0 and rows["fixed-2"]["delta_last"] == [2]
    assert rows["eq4"]["delta_last"] != [1], "two rewards are enough for a window of 1"


def test_scaling(workspace: Workspace, tmp_path: Path) -> None:
    base = config(workspace, steps=1)
    bench_scaling(suite(tmp_path), base, make_axes(base, ["batch"], [1], [0.5, 1.0]))
    rows = left(tmp_path, "scaling")["results"]
    assert [row["value"] for row in rows] == [4, 6], "whole minibatches"
    assert set(json.loads((tmp_path / "scaling.json").read_text())["runs"]) == {
        "batch/4-sequential", "batch/4-full", "base-sequential", "base-full",
    }  # fmt: skip
    assert rows[1]["tokens_per_step"] > rows[0]["tokens_per_step"] and "sequential_growth" in rows[1]


def test_overhead(workspace: Workspace, tmp_path: Path) -> None:
    bench_overhead(suite(tmp_path), config(workspace), batch=16)
    written = left(tmp_path, "overhead")
    tiny, own = written["results"]
    assert (tiny["batch_size"], own["batch_size"]) == (16, 6)
    for row in (tiny, own):
        assert 0 < row["planning_percent"] < 100 and row["planning_ms"] <= 1e3 * row["step_s"]
        assert 0 <= row["untraced_percent"] < 100
    parts = written["dry"]["parts_ms"]
    assert parts["planner and checker"] > 0 and parts["stream"] == 0, "one process streams to nobody"
    assert written["scaled_step_s"] == pytest.approx(own["step_s"] * 16 / 6)
