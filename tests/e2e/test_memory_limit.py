"""A run that runs out of memory ends, names the limit to lower, and with that limit resumes to the same result."""

from __future__ import annotations

import re

import pytest

from oppo_megatron.cli.launch import launch
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import OppoError
from oppo_megatron.rundir.checkpoints import CheckpointStore
from oppo_megatron.rundir.directory import RunDirectory
from tests.support.ppo import SHAPE, Workspace, read_outcome, run_ppo_ranks, weight_distance

BIG = SHAPE | {"vocab_size": 80_000}
SETTINGS = {
    "actor": {"init": BIG, "optimizer": {"lr": 2e-3, "eps": 1e-4}},
    "critic": {"init": BIG, "optimizer": {"lr": 2e-3, "eps": 1e-4}},
    "reward": {"init": BIG},
    "steps": 2,
    "rollout": {"batch_size": 16, "max_response_tokens": 24, "top_k": 6},
    "ppo": {"epochs": 1, "minibatches": 1},
}


@pytest.mark.parametrize(
    ("layout", "mebibytes"),
    [pytest.param({}, 100, id="one rank"), pytest.param({"tp": 2}, 20, id="tensor parallel", marks=pytest.mark.long)],
)
def test_a_run_ends_with_the_limit_to_lower_and_resumes_with_it(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], mebibytes: int
) -> None:
    monkeypatch.setenv("BOUND_MB", str(mebibytes))
    ranks, placement = (2, {"mode": "colocated", "actor": layout}) if layout else (1, {"mode": "single"})
    changes = SETTINGS | {"placement": placement}
    plain = run_ppo_ranks(workspace.config(f"plain-{ranks}", **changes))
    config = TrainConfig(**workspace.config(f"short-{ranks}", **changes, checkpoint={"every_steps": 1}))
    told = ""
    try:
        launch("train", config, ranks, entry="tests.e2e.jobs:run_rank_within")
    except OppoError as error:
        told = str(error)
    found = re.search(r"memory ran out in a training micro-batch of .*; set runtime.micro_batch_tokens to (\d+) or less", told)
    assert found is not None and (ranks == 1 or told.startswith("rank 1: ")), told
    run = RunDirectory(config.run_dir)
    assert [position.step for position in CheckpointStore(run.path / "checkpoints").positions()] == [1]
    runtime = config.runtime.model_copy(update={"micro_batch_tokens": int(found[1])})
    assert launch("train", config.model_copy(update={"runtime": runtime}).resumed(), ranks) == 0
    outcome = read_outcome(run.path)
    assert outcome.tokens() == plain.tokens() and outcome.batches() == plain.batches()
    assert weight_distance(outcome.actor, plain.actor) < 1e-5 and weight_distance(outcome.critic, plain.critic) < 1e-5
