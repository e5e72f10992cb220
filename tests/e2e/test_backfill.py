"""Backfill in real runs: prompts enter within a step, and neither layout nor chunk size nor timing decides which are trained."""

from __future__ import annotations

from collections import Counter

import pytest

from oppo_megatron.sim.runs.virtual import VirtualRun
from tests.support.layouts import assert_same, deep
from tests.support.ordered import OrderedRun
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks
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


def test_few_slots_change_nothing(workspace: Workspace, backfilled: Outcome) -> None:
    """Nine slots of half of a cache are four of a whole one."""
    few = {"placement": {"mode": "disaggregated", "actor": {"tp": 2}}, "runtime.kv_cache_mb": 0.3}
    assert_same(run_ppo_ranks(deep(workspace, "few-slots", **BACKFILL | few)), backfilled)


def test_a_chunk_that_adapts_changes_no_batch(workspace: Workspace, backfilled: Outcome) -> None:
    """It is searched for among sizes up to that of `overlap.backfill`, also such that do not divide it."""
    chunk = {"tokens": EVERY, "adaptive": [3, 64]}
    run = run_ppo_ranks(deep(workspace, "adaptive", **BACKFILL | {"overlap.chunk": chunk}))
    assert {line["chunk_tokens"] for line in run.metrics} == {3, EVERY}
    assert_same(run, backfilled)
