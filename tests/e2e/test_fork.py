"""A prompt's cache is computed once and forked for its responses: the same run as where each response computes its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.started import struck
from tests.support.layouts import WITHOUT_CRITIC, assert_same, deep
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks

GROUPS: dict[str, Any] = {
    "rollout.group_size": 3,
    "rollout.batch_size": 6,
    "overlap.intra": True,
    "overlap.inter": True,
    "overlap.delta": {"rule": "fixed", "initial": 1},
    "overlap.max_staleness": 2,
}
"""One group is carried over each step, with all it has: the actor's cache of it is computed anew, and the critic's."""
APART = {"debug.fork": False}
CASES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, paged": {"runtime.kv_layout": "paged"},
    "PP2 | TP2": {"placement": {"mode": "disaggregated", "actor": {"pp": 2}, "scorer": {"tp": 2}}},
    "TP2 | PP2, paged": {
        "placement": {"mode": "disaggregated", "actor": {"tp": 2}, "scorer": {"pp": 2}},
        "runtime.kv_layout": "paged",
    },
    "PP2, woven": {"placement": {"mode": "colocated", "actor": {"pp": 2}, "scorer": {"pp": 2}}},
    "DP2": {"placement": {"mode": "colocated", "actor": {"dp": 2}, "scorer": {"dp": 2}}},
    "nothing streams": {"overlap.intra": False},
}
SHORT = ("one rank", "one rank, paged", "PP2 | TP2")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("fork"))


@pytest.fixture(scope="module")
def apart(workspace: Workspace) -> Outcome:
    """Each response computes the cache of its prompt."""
    return run_ppo_ranks(deep(workspace, "apart", **GROUPS, **APART))


def forked(outcome: Outcome) -> list[int]:
    return [line["forked_tokens"] for line in outcome.metrics]


@pytest.mark.parametrize(
    "case", [case if case in SHORT else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_forked_prompts_give_the_run_of_prompts_computed_apart(workspace: Workspace, apart: Outcome, case: str) -> None:
    name = "".join(c for c in case if c.isalnum())
    outcome = run_ppo_ranks(deep(workspace, name, **(GROUPS | CASES[case])))
    assert_same(outcome, apart)
    assert min(forked(outcome)) > 0 and not any(forked(apart))
    if case == "nothing streams":  # what is carried is then read in a later step
        apart = run_ppo_ranks(deep(workspace, f"{name}-apart", **(GROUPS | CASES[case] | APART)))
    saved = [line["prefilled_tokens"] + line["forked_tokens"] for line in outcome.metrics]
    assert saved == [line["prefilled_tokens"] for line in apart.metrics]


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [WITHOUT_CRITIC, {"overlap.actor_kv": "keep"}],
    ids=["without a critic", "stale caches kept"],
)
def test_they_do_so_without_a_critic_and_over_kept_caches(workspace: Workspace, changes: dict[str, Any]) -> None:
    name = "-".join(changes).replace(".", "-")
    outcomes = [run_ppo_ranks(deep(workspace, f"{name}-{i}", **GROUPS, **changes, **own)) for i, own in enumerate(({}, APART))]
    assert_same(*outcomes)
    assert min(forked(outcomes[0])) > 0


@pytest.mark.long
def test_a_run_killed_within_groups_is_resumed_with_and_without_their_caches(workspace: Workspace, apart: Outcome) -> None:
    """A rank dies in the second step.  Without caches every prompt in flight is computed once more, for all that answer it."""
    for caches in (True, False):
        config = deep(
            workspace, f"killed-{caches}", **GROUPS, **CASES["PP2 | TP2"],
            checkpoint={"every_steps": 1, "caches": caches},
        )  # fmt: skip
        struck(config, "round", 1, "killed")
        config["checkpoint"] = config["checkpoint"] | {"resume": True}
        outcome = run_ppo_ranks(config)
        assert_same(outcome, apart)
        assert min(forked(outcome)) > 0
