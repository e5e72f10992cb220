"""A run for which there is not enough memory: it goes on with less at once, says so, and comes to the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.cli.launch import launch
from oppo_megatron.cli.run import resuming
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import EXIT_AGAIN
from oppo_megatron.layout.placements import layout_tree
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.memory_limits import lower_memory_limit, read_memory_limits
from tests.support.ppo import SHAPE, Workspace, read_outcome, run_ppo_ranks, weight_distance
from tests.support.ranks import run_new_ranks, run_ranks

JOB = "tests.e2e.jobs:train_with_short_evaluation"
BIG = SHAPE | {"vocab_size": 80_000}
SUMMARY_NAMES = {
    "train": "memory_train_tokens", "score": "memory_prefill_tokens", "decode": "memory_decode_sequences"
}  # fmt: skip
BATCH_TOKENS = 800
"""More than a batch has."""
SETTINGS = {
    "actor": {"init": BIG, "optimizer": {"lr": 2e-3, "eps": 1e-4}},
    "critic": {"init": BIG, "init_seed": 5, "optimizer": {"lr": 2e-3, "eps": 1e-4}},
    "reward": {"init": BIG, "init_seed": 6},
    "steps": 2,
    "rollout": {"batch_size": 16, "max_response_tokens": 24, "top_k": 6},
    "ppo": {"epochs": 1, "minibatches": 1},
}


@pytest.mark.parametrize(
    "intra", [pytest.param(False, id="sequential", marks=pytest.mark.long), pytest.param(True, id="intra")]
)
def test_a_run_goes_on_with_less_at_once(tmp_path: Path, intra: bool) -> None:
    """The address space of its process is limited once its models are built.  With intra memory first runs out in a forward
    pass that is ahead of the scores."""
    workspace, changes = Workspace.create(tmp_path), SETTINGS | {"overlap.intra": intra}
    undisturbed = workspace.config("plain", **changes)
    config = workspace.config("short", **changes, checkpoint={"every_steps": 1})
    run_new_ranks(1, "tests.e2e.jobs:train", config=undisturbed)
    plain = read_outcome(Path(undisturbed["run_dir"]))
    run_ranks(1, "tests.e2e.jobs:train_within", config=config, mebibytes=375)  # after one such run 300 to 450 are as good
    found, folder = read_outcome(Path(config["run_dir"])), Path(config["run_dir"])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["memory_halved"] >= 1 and summary["memory_train_tokens"] < BATCH_TOKENS
    assert found.metrics[0]["memory_halved"] <= found.metrics[1]["memory_halved"] <= summary["memory_halved"]
    # A step's line has what was known before its update, None where nothing was: how much an allocator keeps decides which
    # update is the first to run out.
    bounds = [line["memory_train_tokens"] or BATCH_TOKENS for line in found.metrics]
    assert [*bounds, summary["memory_train_tokens"]] == sorted([*bounds, summary["memory_train_tokens"]], reverse=True)
    assert found.tokens() == plain.tokens() and found.batches() == plain.batches()
    assert weight_distance(found.actor, plain.actor) < 1e-5 and weight_distance(found.critic, plain.critic) < 1e-5
    assert all(line["memory_halved"] == 0 and line["memory_train_tokens"] is None for line in plain.metrics)
    state = json.loads((folder / "checkpoints" / "step-000002" / "state.json").read_text())
    assert state["memory"]["ranks"][0][0] == summary["memory_train_tokens"]


@pytest.mark.parametrize(
    ("layout", "mebibytes"),
    [({"tp": 2}, 160), ({"pp": 2}, 240)],
    ids=["tensor parallel", "pipeline stages"],
)
@pytest.mark.long
def test_ranks_that_compute_together_start_again_with_less_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    layout: dict[str, int],
    mebibytes: int,
) -> None:
    """One of them runs out: its peers cannot know, so all end, and the next start bounds every rank alike."""
    monkeypatch.setenv("BOUND_MB", str(mebibytes))
    workspace = Workspace.create(tmp_path)
    changes = SETTINGS | {"placement": {"mode": "colocated", "actor": layout}}
    plain = run_ppo_ranks(workspace.config("plain", **changes))
    config = TrainConfig(**workspace.config("short", **changes, checkpoint={"every_steps": 1}))
    codes = []
    while not codes or codes[-1] == EXIT_AGAIN:
        assert len(codes) < 8, codes
        codes.append(launch("train", config, 2, entry="tests.e2e.jobs:run_rank_within"))
        config = resuming(config)
    assert codes[-1] == 0 and len(codes) > 1, codes
    run = RunDirectory(config.run_dir)
    limits, told = read_memory_limits(run, layout_tree(config)), capfd.readouterr().err
    assert limits and "rank 1 ran out of memory in " in told and "from the last checkpoint on at most" in told
    found, summary = read_outcome(run.path), json.loads(run.summary.read_text())
    assert all(summary[SUMMARY_NAMES[name]] <= most for name, most in limits.items())
    assert found.tokens() == plain.tokens() and found.batches() == plain.batches()
    assert weight_distance(found.actor, plain.actor) < 1e-5 and weight_distance(found.critic, plain.critic) < 1e-5


def evaluated(workspace: Workspace, name: str, **changes: object) -> dict[str, Any]:
    """One step, with held-out responses to 16 prompts before and after it."""
    rows = {"path": str(workspace.root / "data" / "heldout.jsonl"), "max_prompt_tokens": 96}
    evaluation = {"data": rows, "verifier": "arithmetic", "max_rows": 16, "metrics": [{"kind": "model"}]}
    rollout = {"batch_size": 16, "max_response_tokens": 24}
    return workspace.config(name, steps=1, rollout=rollout, evaluation=evaluation, **changes)


def summary_of(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(config["run_dir"]) / "summary.json").read_text())
    return found


def test_held_out_evaluation_finds_a_limit_of_its_own(tmp_path: Path) -> None:
    """It is not the run's, which is lower here, nor the run's it; and what it has found holds for its next time."""
    workspace = Workspace.create(tmp_path)
    plain, config = evaluated(workspace, "plain"), evaluated(workspace, "short")
    run_ppo_ranks(plain)
    ((ended_by, _, sizes),) = run_ranks(1, JOB, config=config, most=5, decode=2)
    assert ended_by is None
    assert [size for size in sizes if size > 5] == [16, 8] and max(sizes[2:]) == 4
    ours, theirs = summary_of(config), summary_of(plain)
    assert ours["heldout"].keys() == {"0", "1"}
    assert ours["heldout"]["0"]["mean"] == pytest.approx(theirs["heldout"]["0"]["mean"])
    assert ours["memory_decode_sequences"] == 2 and ours["memory_halved"] == 0
    assert theirs["memory_decode_sequences"] is None


@pytest.mark.long
def test_a_limit_that_evaluation_meets_among_peers_bounds_its_next_start(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path)
    config = evaluated(workspace, "peers", placement={"mode": "colocated", "actor": {"tp": 2}})
    layout = layout_tree(TrainConfig(**config))
    for bound in 8, 4, None:
        for ended_by, most, _ in run_ranks(2, JOB, config=config, most=5):
            assert (ended_by, most or None) == ("decode" if bound else None, bound)
            if ended_by:
                lower_memory_limit(RunDirectory(config["run_dir"]), layout, ended_by, most)
        config["checkpoint"] = {"resume": True}
    assert summary_of(config)["heldout"].keys() == {"0", "1"}
