"""Forked caches of prompts beside what the matrix has: stale caches that are kept, and a run that is killed and resumed."""

from __future__ import annotations

import pytest

from tests.e2e.matrix import FEATURES, Matrix
from tests.e2e.started import struck
from tests.support.layouts import assert_same
from tests.support.ppo import run_ppo_ranks

FORK = FEATURES["prompts fork"].changes
pytestmark = pytest.mark.long


def test_stale_caches_that_are_kept_fork(matrix: Matrix) -> None:
    kept = FORK | {"overlap.actor_kv": "keep"}
    changed = {name: kept | {"overlap.without": without} for name, without in (("forked", []), ("apart", ["fork"]))}
    forked, apart = (run_ppo_ranks(matrix.config("fork-kept", name, changes)) for name, changes in changed.items())
    assert_same(forked, apart)
    assert min(line["forked_tokens"] for line in forked.metrics) > 0


@pytest.mark.parametrize("placement", [None, {"mode": "single"}], ids=["with caches", "without caches"])
def test_a_run_killed_within_groups_is_resumed_with_and_without_their_caches(
    matrix: Matrix, placement: dict[str, str] | None
) -> None:
    """A rank dies in the second step.  In another layout every prompt in flight is computed once more, for all that answer it."""
    config = matrix.in_layout("prompts fork", "PP2 | TP2", name=f"killed-{placement is None}")
    config["checkpoint"] = {"every_steps": 1}
    struck(config, "round", 1, "killed")
    config["placement"] = placement or config["placement"]
    config["checkpoint"]["resume"] = True
    outcome = run_ppo_ranks(config)
    assert_same(outcome, matrix.reference("prompts fork"))
    assert min(line["forked_tokens"] for line in outcome.metrics) > 0
