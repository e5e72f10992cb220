"""Runs in virtual time beside real ones: every rule of delta, groups, backfill, forced lengths."""

from __future__ import annotations

from typing import Any

import pytest

from oppo_megatron.control.delta_controllers import RULES
from tests.support.ppo import Workspace, run_ppo_ranks
from tests.support.virtual import assert_unfolds_alike

DELTA = {"initial": 3, "min": 0, "max": 6, "window": 1}
CASES: dict[str, dict[str, Any]] = {
    **{f"rule {rule}": {"overlap.delta": DELTA | {"rule": rule}} for rule in RULES},
    "groups, backfill, scorers beside": {
        "overlap.delta": {"rule": "fixed", "initial": 1, "max": 1}, "rollout.group_size": 3, "overlap.backfill": 4,
        "placement": {"mode": "disaggregated"},
    },
    "forced lengths, chunk searched, replicas": {
        "debug.forced_lengths": [12, 1.0], "overlap.delta": DELTA | {"rule": "measured", "change": [2, 1]},
        "overlap.chunk": {"tokens": 8, "adaptive": [4, 8]},
        "placement": {"mode": "colocated", "actor": {"dp": 2}, "scorer": {"dp": 2}},
    },
    "every chunk read, stale caches kept": {
        "overlap.critic_reads": "all", "overlap.actor_kv": "keep", "overlap.delta": DELTA | {"rule": "fixed"},
        "placement": {"mode": "disaggregated"},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("virtual"))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_batches_and_deferrals_are_those_of_a_real_run(workspace: Workspace, case: str) -> None:
    both = {"overlap.intra": True, "overlap.inter": True, "steps": 8}
    config = workspace.config("".join(c for c in case if c.isalnum()), **both | CASES[case])
    outcome = run_ppo_ranks(config)
    assert any(row["deferrals"] for row in outcome.rollouts), "some should be carried"
    assert_unfolds_alike(config, outcome, "laps", "actions")
