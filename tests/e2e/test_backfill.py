"""Backfill in real runs: prompts enter within a step, and neither layout nor chunk size nor timing decides which are trained."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Any

import pytest

from oppo_megatron.sim.runs.virtual import VirtualRun
from tests.support.layouts import assert_same, deep
from tests.support.ordered import OrderedRun
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks, weight_distance
from tests.support.virtual import assert_unfolds_alike

STEPS, BATCH, DELTA, EVERY = 6, 6, 3, 4
BACKFILL = {
    "steps": STEPS,
    "overlap.intra": True,
    "overlap.inter": True,
    "overlap.delta": {"rule": "fixed", "initial": DELTA, "max": DELTA},
    "overlap.chunk.tokens": EVERY,
    "overlap.backfill": EVERY,
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("backfill"))


@pytest.fixture(scope="module")
def backfilled(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(deep(workspace, "backfilled", **BACKFILL))


def test_every_prompt_is_trained_exactly_once(backfilled: Outcome) -> None:
    assert Counter(row["seq_id"] for row in backfilled.rollouts) == {i: 1 for i in range(STEPS * BATCH)}
    assert [len(batch) for batch in backfilled.batches()] == [BATCH] * STEPS
    assert sum(line["backfilled"] for line in backfilled.metrics) > BATCH, "prompts enter within steps"
    assert max(line["carried"] for line in backfilled.metrics) <= BATCH
    assert max(row["deferrals"] for row in backfilled.rollouts) <= 4
    assert backfilled.metrics[-1]["carried"] == 0
    assert all(0 < line["packing_efficiency"] <= 1 > line["padding_saved"] > 0 for line in backfilled.metrics)


def test_it_unfolds_alike_in_virtual_time(workspace: Workspace, backfilled: Outcome) -> None:
    assert_unfolds_alike(deep(workspace, "backfilled", **BACKFILL), backfilled, VirtualRun, OrderedRun)


def test_decoding_stays_full(workspace: Workspace, backfilled: Outcome) -> None:
    """Of B + delta places, those in use in a decode step, while there are prompts."""
    plain = run_ppo_ranks(deep(workspace, "plain", **BACKFILL | {"overlap.backfill": False}))
    assert all(line["backfilled"] == 0 for line in plain.metrics)
    means = [fmean(line["running_mean"] for line in run.metrics[:3]) for run in (plain, backfilled)]
    assert means[0] + 0.5 < means[1] <= BATCH + DELTA


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(
            "pp2-m3",
            {"placement": {"mode": "colocated", "actor": {"pp": 2}}, "overlap.weave": [3, "auto"]},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "dp2-streamed", {"placement": {"mode": "disaggregated", "actor": {"dp": 2}}}, marks=pytest.mark.long
        ),
        pytest.param(
            "tp2-scorer-dp2",
            {"placement": {"mode": "disaggregated", "actor": {"tp": 2}, "scorer": {"dp": 2}}},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "pp2-dp2-m2",
            {"placement": {"mode": "colocated", "actor": {"pp": 2, "dp": 2}}, "overlap.weave": [2, "auto"]},
            marks=pytest.mark.long,
        ),
        # nine slots of the actor's half of a cache are four of a whole one
        ("tp2-few-slots", {"placement": {"mode": "disaggregated", "actor": {"tp": 2}}, "runtime.kv_cache_mb": 0.3}),
    ],
)
def test_every_layout_trains_as_one_process(
    workspace: Workspace, backfilled: Outcome, name: str, changes: dict[str, Any]
) -> None:
    assert_same(run_ppo_ranks(deep(workspace, name, **BACKFILL | changes)), backfilled)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("kept", {"overlap.actor_kv": "keep"}),
        ("unstreamed", {"overlap.intra": False, "overlap.actor_kv": "recompute"}),
    ],
)
@pytest.mark.long
def test_replicas_train_alike_under_other_settings(workspace: Workspace, name: str, changes: dict[str, Any]) -> None:
    alone = run_ppo_ranks(deep(workspace, f"{name}-alone", **BACKFILL | changes))
    dp2 = {"placement": {"mode": "disaggregated", "actor": {"dp": 2}, "scorer": {"pp": 2}}}
    assert_same(run_ppo_ranks(deep(workspace, f"{name}-dp2", **BACKFILL | changes | dp2)), alone)


def test_batches_do_not_depend_on_the_chunk_size(workspace: Workspace, backfilled: Outcome) -> None:
    other = run_ppo_ranks(deep(workspace, "chunk-1", **BACKFILL | {"overlap.chunk.tokens": 1}))
    assert_same(other, backfilled)


def test_a_chunk_that_adapts_changes_no_batch(workspace: Workspace, backfilled: Outcome) -> None:
    """It is searched for among sizes up to that of `overlap.backfill`, also such that do not divide it."""
    chunk = {"tokens": EVERY, "adaptive": [3, 64]}
    run = run_ppo_ranks(deep(workspace, "adaptive", **BACKFILL | {"overlap.chunk": chunk}))
    assert {line["chunk_tokens"] for line in run.metrics} == {3, EVERY}
    assert_same(run, backfilled)


def test_two_runs_are_identical(workspace: Workspace, backfilled: Outcome) -> None:
    again = run_ppo_ranks(deep(workspace, "again", **BACKFILL))
    assert again.rollouts == backfilled.rollouts
    assert weight_distance(again.actor, backfilled.actor) == weight_distance(again.critic, backfilled.critic) == 0.0


def test_the_end_of_the_data_is_a_smaller_batch(workspace: Workspace) -> None:
    run = run_ppo_ranks(deep(workspace, "end", **BACKFILL | {"steps": None, "data.max_rows": 20}))
    assert [len(batch) for batch in run.batches()] == [6, 6, 6, 2]
    assert sorted(run.tokens()) == list(range(20))


def test_forced_rollouts_are_waited_for(workspace: Workspace) -> None:
    run = run_ppo_ranks(deep(workspace, "forced", **BACKFILL | {"overlap.max_staleness": 1}))
    assert max(row["deferrals"] for row in run.rollouts) == 1
    assert sorted(run.tokens()) == list(range(STEPS * BATCH))
