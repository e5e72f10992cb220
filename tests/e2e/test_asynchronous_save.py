"""`checkpoint.asynchronous`: what is written beside the run is its state at the moment of the checkpoint, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_resume import CARRIED, TWO_RANKS, assert_bit_equal, checkpoints, resumed, rewound, stop
from tests.support.layouts import deep
from tests.support.ppo import Workspace, read_outcome, run_ppo_ranks
from tests.support.ranks import run_ranks

LATE_S = 1.0
REPLICAS = {"placement": {"mode": "colocated", "actor": {"dp": 2}, "scorer": {"dp": 2}}}
JOB = "tests.e2e.jobs_checkpoint:run_with_a_slow_disk"
FIVE_STEPS = CARRIED | {"steps": 5, "checkpoint.every_steps": 2, "checkpoint.keep": 9, "checkpoint.final": False}


@pytest.mark.parametrize(
    "layout", [TWO_RANKS, pytest.param(REPLICAS, marks=pytest.mark.long)], ids=["actor | scorers", "replicas"]
)
def test_a_checkpoint_written_beside_the_run_is_that_of_its_moment(workspace: Workspace, layout: dict[str, Any]) -> None:
    name = str(layout["placement"]["mode"])
    plain = run_ppo_ranks(deep(workspace, f"{name}-plain", **FIVE_STEPS, **layout))
    config = deep(workspace, name, **FIVE_STEPS, **layout, **{"checkpoint.asynchronous": True})
    for message, steps in run_ranks(2, JOB, config=config, late_s=None):
        assert message == "" and len(steps) == 4
        assert steps[0] == 2 and steps[1] > 2, f"writing began and ended after steps {steps}"
    beside = read_outcome(Path(config["run_dir"]))
    assert_bit_equal(beside, plain)
    hidden = sum(line["checkpoint_hidden_s"] for line in beside.metrics)
    assert hidden > 0 and sum(line["checkpoint_hidden_s"] for line in plain.metrics) == 0
    assert checkpoints(config) == ["step-000002", "step-000004"]
    assert_bit_equal(resumed(rewound(config, "again")), plain)


def test_told_to_stop_the_run_waits_for_its_checkpoint(workspace: Workspace) -> None:
    config = deep(workspace, "stopped", **CARRIED, **TWO_RANKS, **{"checkpoint.asynchronous": True})
    stop(config, rounds=3)
    assert len(checkpoints(config)) == 1 and "clock" in checkpoints(config)[0]


def test_a_guard_waits_for_the_checkpoint_that_it_goes_back_to(workspace: Workspace) -> None:
    poisoned = {"kind": "python", "entry_point": "tests.e2e.rewards:breaks", "options": {"name": "waits", "good": 6}}
    checkpoint = {"every_steps": 1, "asynchronous": True}
    config = workspace.config("guarded", checkpoint=checkpoint, rewards=[poisoned], guards={"action": "rollback"})
    ((message, steps),) = run_ranks(1, JOB, config=config | {"reward": None}, late_s=LATE_S)
    assert message.startswith("RollBack: step 2: ") and "back to step-000001; 6 prompts are left out" in message
    assert steps == [1, 1] and checkpoints(config) == ["step-000001"]


def test_a_disk_without_space_ends_the_run_on_all_ranks(workspace: Workspace) -> None:
    config = deep(workspace, "full", **CARRIED, **TWO_RANKS, **{"checkpoint.asynchronous": True, "checkpoint.every_steps": 1})
    answers = run_ranks(2, JOB, config=config, late_s=0.1, full_on=1)
    for message, _ in answers:
        assert message.startswith("CheckpointError: ") and "rank 1: No space left" in message
        assert "no checkpoint has been written yet" in message and "nothing is left of this one" in message
    assert checkpoints(config) == []
