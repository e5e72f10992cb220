"""The filter of groups in real runs: chunk sizes, streaming and placements do not decide what is dropped, or trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.layouts import assert_same, deep
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks

STEPS, BATCH, GROUP, EVERY = 3, 6, 2, 8


def dapo(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    """Groups of two, of which those are dropped whose responses are both of an even length, or both of an odd one."""
    calls = workspace.root / f"{name}.calls"
    parity = {"kind": "python", "entry_point": "tests.e2e.rewards:parity", "options": {"run": str(calls)}}
    settings: dict[str, Any] = {
        "steps": STEPS,
        "algorithm": {"preset": "dapo"},
        "critic": None,
        "reward": None,
        "rewards": [parity],
        "rollout.group_size": GROUP,
        "ppo": {"minibatches": 1},
        "overlong": {"buffer": 10, "penalty": 0.5, "mask": True},
        "overlap.inter": True,
        "overlap.delta": {"rule": "fixed", "initial": 0, "min": 0, "max": 0},
        "overlap.backfill": EVERY,
        "overlap.chunk.tokens": EVERY,
    }
    return deep(workspace, name, **settings | changes)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("filter"))


@pytest.fixture(scope="module")
def sequential(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(dapo(workspace, "sequential"))


def test_groups_that_are_all_the_same_are_dropped(workspace: Workspace, sequential: Outcome) -> None:
    for batch in sequential.batches():
        assert len(batch) == BATCH
    assert sum(line["groups_dropped"] for line in sequential.metrics) > 0
    assert [line["equal_groups"] for line in sequential.metrics] == [0.0] * STEPS
