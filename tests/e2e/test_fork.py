"""A prompt's cache is computed once and forked for its responses: the same run as where each response computes its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.layouts import assert_same, deep
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks

GROUPS: dict[str, Any] = {
    "rollout.group_size": 3,
    "rollout.batch_size": 6,
    "overlap.intra": True,
    "overlap.inter": True,
    "overlap.delta": {"rule": "fixed", "initial": 1},
    "overlap.max_deferrals": 2,
}
"""One group is carried over each step, with all it has: the actor's cache of it is computed anew, and the critic's."""
TWO_SIDES = {"placement": {"mode": "disaggregated", "actor": {"pp": 2}, "scorer": {"tp": 2}}}
CASES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, paged": {"runtime.kv_layout": "paged"},
    "PP2 | TP2": TWO_SIDES,
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("fork"))


@pytest.fixture(scope="module")
def apart(workspace: Workspace) -> Outcome:
    """Each response computes the cache of its prompt."""
    return run_ppo_ranks(deep(workspace, "apart", **GROUPS, **{"debug.fork": False}))


@pytest.mark.parametrize("case", CASES)
def test_forked_prompts_give_the_run_of_prompts_computed_apart(workspace: Workspace, apart: Outcome, case: str) -> None:
    name = "".join(c for c in case if c.isalnum())
    outcome = run_ppo_ranks(deep(workspace, name, **GROUPS, **CASES[case]))
    assert_same(outcome, apart)
