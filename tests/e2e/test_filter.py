"""The filter of groups in real runs: what is dropped, and when that ends a run; the matrix compares layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.matrix import BY_PARITY, FEATURES, overcommitted
from tests.support.layouts import assert_same, deep
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks

STEPS, BATCH, GROUP = 3, 6, 2


def dapo(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    """Groups of two, of which those are dropped whose responses are both of an even length, or both of an odd one."""
    parity = BY_PARITY | {"options": {"calls": str(calls_of(workspace, name))}}
    alone = {"rewards": [parity], "reward": None, "ppo.kl": {"mode": "none"}}
    return deep(workspace, name, **FEATURES["filter"].changes | overcommitted(0) | alone | changes)


def calls_of(workspace: Workspace, name: str) -> Path:
    return workspace.root / f"{name}.calls"


@pytest.fixture(scope="module")
def sequential(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(dapo(workspace, "sequential"))


def dropped(outcome: Outcome) -> int:
    return sum(line["groups_dropped"] for line in outcome.metrics)


def assert_once(workspace: Workspace, name: str, outcome: Outcome) -> None:
    """The function was called once for each response that was trained or dropped."""
    calls = calls_of(workspace, name).read_text().splitlines()
    assert len(calls) == STEPS * BATCH + GROUP * dropped(outcome)


def test_groups_that_are_all_the_same_are_dropped(workspace: Workspace, sequential: Outcome) -> None:
    assert [len(batch) for batch in sequential.batches()] == [BATCH] * STEPS
    rewards = {row["seq_id"]: row["reward"] for row in sequential.rollouts}
    groups = {seq_id // GROUP for seq_id in rewards}
    assert all(rewards[GROUP * g] != rewards[GROUP * g + 1] for g in groups)
    assert dropped(sequential) > 1 and sum(line["backfilled"] for line in sequential.metrics) == GROUP * dropped(sequential)
    assert max(groups) + 1 == len(groups) + dropped(sequential), "no prompt beyond the last that was needed"
    for line in sequential.metrics:
        assert line["keep_rate"] == 3 / (3 + line["groups_dropped"])
        assert line["equal_groups"] == line["carried"] == 0
    assert_once(workspace, "sequential", sequential)


@pytest.mark.long
def test_a_response_is_dropped_where_its_greedy_one_scores_the_same(workspace: Workspace) -> None:
    """A group of one and its greedy baseline, in another layout too."""
    changes = {"algorithm": {"preset": "remax"}, "filter": "reward", "rollout.group_size": 1, "overlap.intra": True}
    one = run_ppo_ranks(dapo(workspace, "greedy", **overcommitted(1) | changes))
    assert [len(batch) for batch in one.batches()] == [BATCH] * STEPS and len(one.greedy) == STEPS * BATCH
    rewards = {row["seq_id"]: row["reward"] for row in [*one.rollouts, *one.greedy]}
    assert all(rewards[seq_id] != rewards[seq_id + 1] for seq_id in rewards if seq_id % 2 == 0)
    assert dropped(one) > 1 and all(line["equal_groups"] == 0 for line in one.metrics)
    calls = calls_of(workspace, "greedy").read_text().splitlines()
    assert len(calls) == 2 * (STEPS * BATCH + dropped(one)), "each response once"
    apart = {"placement": {"mode": "disaggregated", "actor": {"tp": 2}}, "overlap.chunk.tokens": 7}
    assert_same(run_ppo_ranks(dapo(workspace, "greedy-apart", **overcommitted(1) | changes | apart)), one)


def flat(workspace: Workspace, name: str, unlike: int, **changes: Any) -> dict[str, Any]:
    """The rows in their order; only the first few have prompts whose responses are not all the same."""
    rows = (workspace.root / "data" / "prompts.jsonl").read_text().splitlines()
    level = {"kind": "python", "entry_point": "tests.e2e.rewards:level"}
    level |= {"options": {"flat": [json.loads(row)["prompt"] for row in rows[unlike:]]}}
    return dapo(workspace, name, **{"rewards": [level], "data.shuffle": False} | changes)


def test_a_filter_that_drops_everything_has_an_end(workspace: Workspace) -> None:
    with pytest.raises(
        AssertionError, match=r"SamplingError.*3[0-2] groups were judged in this step, and 0 of them kept \(0\.0%\)"
    ):
        run_ppo_ranks(flat(workspace, "nothing", 0))
    with pytest.raises(AssertionError, match="none of the last 4 groups was worth training, and no step was made"):
        run_ppo_ranks(flat(workspace, "no-step", 0, **{"steps": None, "data.max_rows": 4}))


def test_prompts_of_which_nothing_is_left_end_the_run_after_its_last_batch(workspace: Workspace) -> None:
    """Three of five groups make a step; the others are dropped, and held-out prompts are answered once after it."""
    heldout = {
        "data": {"path": str(workspace.root / "data" / "heldout.jsonl"), "max_prompt_tokens": 96, "max_rows": 4},
        "verifier": "arithmetic",
    }
    config = flat(workspace, "end", 3, **{"steps": None, "data.max_rows": 5, "evaluation": heldout})
    outcome = run_ppo_ranks(config)
    assert [sorted(batch) for batch in outcome.batches()] == [list(range(BATCH))]
    summary = json.loads((Path(config["run_dir"]) / "summary.json").read_text())
    assert summary["heldout_accuracy"].keys() == {"0", "1"}
