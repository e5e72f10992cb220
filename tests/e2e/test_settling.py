"""Responses that end early in real runs: neither streaming nor chunks nor placements nor stops decide where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.preflight.settings import check_train
from tests.e2e.test_filter import BATCH, EVERY, GROUP, dapo
from tests.e2e.test_resume import assert_bit_equal, checkpoints, resumed, stop
from tests.support.layouts import assert_same
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks

FIFTH = {"kind": "python", "entry_point": "tests.e2e.rewards:fifth"}


def settling(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    """Groups of two, of which those are dropped whose fifth characters are alike; a reference reads what is decoded."""
    settings = {"rewards": [FIFTH], "settle": {"mode": "predicted", "audit": 4}, "overlong": {}}
    return dapo(workspace, name, delta=1, **settings | {"ppo.kl": {"mode": "penalty", "coefficient": 0.1}} | changes)


@pytest.fixture(scope="module")
def alone(workspace: Workspace) -> Outcome:
    """One rank, nothing streamed."""
    return run_ppo_ranks(settling(workspace, "alone"))


def figures(outcome: Outcome) -> list[tuple[Any, ...]]:
    names = "settled_rows", "settled_tokens", "audited_rows", "audited_tokens", "groups_dropped"
    return [tuple(line[name] for name in names) for line in outcome.metrics]


def settled(outcome: Outcome) -> list[dict[str, Any]]:
    return [row for row in outcome.rollouts if row["finish_reason"] == "settled"]


def test_settled_responses_end_on_the_clock_of_the_questions(alone: Outcome) -> None:
    assert len(settled(alone)) > 4 and all(row["finish_clock"] % EVERY == 0 for row in settled(alone))
    assert all(len(row["response"].rstrip("\ufffd")) > 4 for row in settled(alone))
    others = [row for row in alone.rollouts if row["finish_reason"] != "settled"]
    assert max(len(row["tokens"]) for row in others) > max(len(row["tokens"]) for row in settled(alone))
    assert alone.metrics[-1]["audited_rows"] > 0 and alone.metrics[-1]["settled_tokens"] > 0
    assert sum(line["settled_rows"] for line in alone.metrics) >= len(settled(alone))


def test_what_is_trained_first_are_prefixes_of_whole_responses(workspace: Workspace) -> None:
    """Where ending early is certain, a first step has the same responses and rewards, up to where they are settled."""
    plain = {
        "steps": 1, "algorithm": {"preset": "dr_grpo"}, "ppo.kl": {"mode": "none"}, "rollout.top_k": 0,
        "overlap": {"inter": False, "chunk": {"tokens": EVERY, "adaptive": False}},
    }  # fmt: skip
    config = settling(workspace, "early", settle={"mode": "certain", "audit": 0}, **plain)
    assert check_train(TrainConfig.model_validate(config)) == []
    early = run_ppo_ranks(config)
    whole = run_ppo_ranks(settling(workspace, "whole", settle={"mode": "off"}, **plain))
    ends = {row["seq_id"]: row for row in whole.rollouts}
    assert len(early.rollouts) == len(whole.rollouts) == BATCH and settled(early)
    for row in early.rollouts:
        end = ends[row["seq_id"]]
        assert row["reward"] == end["reward"] and row["tokens"] == end["tokens"][: len(row["tokens"])]
        assert row["finish_reason"] == "settled" or row["tokens"] == end["tokens"]


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.long), 7, pytest.param(64, marks=pytest.mark.long)])
def test_streamed_chunks_of_any_size_train_the_same(workspace: Workspace, alone: Outcome, chunk: int) -> None:
    """A reference that has read beyond the end of a response reads what is left anew."""
    outcome = run_ppo_ranks(settling(workspace, f"chunk-{chunk}", **{"overlap.intra": True, "overlap.chunk.tokens": chunk}))
    assert_same(outcome, alone)
    assert figures(outcome) == figures(alone)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tp2", {"placement": {"mode": "colocated", "actor": {"tp": 2}, "scorer": {"tp": 2}}}),
        pytest.param("pp2", {"placement": {"mode": "colocated", "actor": {"pp": 2}}}, marks=pytest.mark.long),
        pytest.param(
            "dp2", {"placement": {"mode": "colocated", "actor": {"dp": 2}, "scorer": {"dp": 2}}}, marks=pytest.mark.long
        ),
        pytest.param("apart", {"placement": {"mode": "disaggregated"}}, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_every_layout_trains_as_one_rank(workspace: Workspace, alone: Outcome, name: str, changes: dict[str, Any]) -> None:
    streamed = {"overlap.intra": True, "overlap.chunk.tokens": 7}
    outcome = run_ppo_ranks(settling(workspace, name, **streamed, **changes))
    assert_same(outcome, alone)
    assert figures(outcome) == figures(alone)


def test_a_run_that_was_stopped_goes_on_to_the_bit(workspace: Workspace) -> None:
    """Told to stop within a rollout: what was settled, and is checked at its end, is saved."""
    changes: dict[str, Any] = {"overlap.intra": True, "overlap.chunk.tokens": 7}
    plain = run_ppo_ranks(settling(workspace, "unstopped", **changes))
    config = settling(workspace, "stopped", **changes)
    stop(config, rounds=3)
    assert "clock" in checkpoints(config)[-1]
    assert_bit_equal(resumed(config), plain)


def test_a_reward_that_changes_what_it_has_settled_ends_the_run(workspace: Workspace) -> None:
    """Its groups are audited, and so go on to their ends; the function in its process is asked as one here is."""
    fickle = {"kind": "python", "entry_point": "tests.e2e.rewards:fickle", "options": {"bound": 5}, "isolate": True}
    config = settling(workspace, "fickle", rewards=[fickle], settle={"mode": "predicted", "audit": 1})
    with pytest.raises(
        AssertionError,
        match=r"RewardError.*sequence \d+ \(of .*prompts\.jsonl:\d+\): reward part 'tests\.e2e\.rewards:fickle' was settled as 3 "
        r"by the first \d+ tokens, but gives [45] for the response",
    ):
        run_ppo_ranks(config)


def test_rewards_are_asked_for_what_is_still_decoded_only(workspace: Workspace, tmp_path: Path) -> None:
    """Once a period for each response that is not settled, and a few times more to find the token that settles it."""
    calls = tmp_path / "calls"
    options = FIFTH | {"options": {"calls": str(calls)}}
    plain = {"steps": 1, "overlap": {"inter": False, "chunk": {"tokens": 7, "adaptive": False}}, "filter": None}
    outcome = run_ppo_ranks(
        settling(workspace, "asked", rewards=[options], settle={"mode": "predicted", "every": 20, "audit": 0}, **plain)
    )
    asked = [int(line) for line in calls.read_text().splitlines()]
    found = settled(outcome)
    periods = sum((row["finish_clock"] or 0) // 20 for row in outcome.rollouts)
    assert found and len(found) <= len(asked) <= periods + 6 * len(found)
    assert GROUP * 3 == BATCH
