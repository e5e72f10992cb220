"""Inter-step overlap and backfill in real runs: what delta > 0 may change and what it may not."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Any

import pytest

from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.control.delta_controllers import make_delta_controller
from oppo_megatron.records import StepSignals
from oppo_megatron.sim.runs.virtual import VirtualRun
from tests.support.layouts import assert_same, deep
from tests.support.ordered import OrderedRun
from tests.support.ppo import Outcome, Workspace, run_ppo_ranks
from tests.support.virtual import assert_unfolds_alike

STEPS, BATCH, DELTA = 7, 6, 4
DISAGGREGATED = {"mode": "disaggregated"}
EVERY, BACKFILLED = 4, 6
BACKFILL = {
    "steps": BACKFILLED,
    "overlap.intra": True,
    "overlap.inter": True,
    "overlap.delta": {"rule": "fixed", "initial": 3, "max": 3},
    "overlap.chunk": EVERY,
    "overlap.backfill": EVERY,
}


def overcommitted(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    delta = {"rule": "fixed", "initial": DELTA, "max": DELTA}
    settings = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": delta, "steps": STEPS}
    return workspace.config(name, placement=DISAGGREGATED, **(settings | changes))


@pytest.fixture(scope="module")
def outcome(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(overcommitted(workspace, "first"))


def test_every_prompt_is_trained_exactly_once(outcome: Outcome) -> None:
    assert Counter(row["seq_id"] for row in outcome.rollouts) == {i: 1 for i in range(STEPS * BATCH)}
    assert [len(batch) for batch in outcome.batches()] == [BATCH] * STEPS


def test_it_unfolds_alike_in_virtual_time(workspace: Workspace, outcome: Outcome) -> None:
    assert_unfolds_alike(overcommitted(workspace, "first"), outcome, VirtualRun, OrderedRun)


def test_rollouts_are_carried_with_all_their_tokens(outcome: Outcome) -> None:
    carried = [row for row in outcome.rollouts if row["deferrals"]]
    assert carried, "the run should defer something"
    for row in outcome.rollouts:
        assert len(row["tokens"]) == len(row["versions"]) == len(row["logprobs"])
        assert row["versions"] == sorted(row["versions"])
        # A step has one policy version: a rollout's tokens span as many versions as the steps it was decoded in.
        assert row["versions"][-1] <= row["step"] - 1
        assert row["versions"][0] >= row["step"] - 1 - row["deferrals"]
    assert any(len(set(row["versions"])) > 1 for row in carried), "some rollout should span an update"


def test_logprobs_at_decode_equal_those_at_training(outcome: Outcome) -> None:
    assert max(line["logprob_gap"] for line in outcome.metrics) < 1e-4
    assert max(line["stale_token_fraction"] for line in outcome.metrics) > 0


def test_trained_lengths_stand_beside_submitted_ones_and_rewards_by_length(outcome: Outcome) -> None:
    """Counts as a reader of rollouts.jsonl would: carried ones have the tokens of then, by their versions."""
    gaps = []
    for line in outcome.metrics:
        batch = [row for row in outcome.rollouts if row["step"] == line["step"]]
        later = [row["versions"] for row in outcome.rollouts if row["step"] > line["step"]]
        carried = [so_far for each in later if (so_far := sum(version < line["step"] for version in each))]
        trained = [len(row["tokens"]) for row in batch]
        assert line["carried"] == len(carried) and line["trained_len_max"] == max(trained)
        assert line["trained_len_mean"] == pytest.approx(fmean(trained))
        assert line["submitted_len_mean"] == pytest.approx(fmean(trained + carried))
        assert line["length_gap"] == pytest.approx(1 - fmean(trained) / fmean(trained + carried))
        gaps.append(line["length_gap"])
        batch.sort(key=lambda row: len(row["tokens"]))
        quarters = [batch[:1], batch[1:3], batch[3:4], batch[4:]]
        for name, of in ("length_by_quarter", lambda row: len(row["tokens"])), ("reward_by_quarter", lambda row: row["reward"]):
            assert line[name] == pytest.approx({f"q{k + 1}": fmean(map(of, rows)) for k, rows in enumerate(quarters)}), name
    assert any(gaps)


@pytest.mark.parametrize("limit", [1, 2])
def test_no_rollout_is_deferred_beyond_the_limit(workspace: Workspace, limit: int) -> None:
    config = overcommitted(workspace, f"cap-{limit}", **{"overlap.max_staleness": limit})
    capped = run_ppo_ranks(config)
    assert_unfolds_alike(config, capped)
    assert max(row["deferrals"] for row in capped.rollouts) <= limit
    assert sorted(capped.tokens()) == list(range(STEPS * BATCH))


@pytest.mark.parametrize("correction", ["behaviour", "decoupled"])
@pytest.mark.parametrize("actor_kv", ["recompute", "keep"])
def test_staleness_settings_run_and_gate_the_fresh_tokens(workspace: Workspace, correction: str, actor_kv: str) -> None:
    changes = {"ppo.staleness": correction, "overlap.actor_kv": actor_kv}
    run = run_ppo_ranks(overcommitted(workspace, f"{correction}-{actor_kv}", **changes))
    assert sorted(run.tokens()) == list(range(STEPS * BATCH))
    assert max(line["logprob_gap"] for line in run.metrics) < 1e-4
    weights = [line["importance_weight_mean"] for line in run.metrics]
    assert any(w != 1.0 for w in weights) == (correction == "decoupled")
    assert all(0 < line["ess"] <= 1 + 1e-9 for line in run.metrics)
    gaps = [(line["logprob_gap_judged"], line["logprob_gap"]) for line in run.metrics]
    assert all(0 < judged <= gap or judged == gap == 0 for judged, gap in gaps)
    # Most tokens of the second step are stale; with `behaviour` only the first minibatch's fresh ones are looked at.
    assert all(gap > 0 for step, (_, gap) in enumerate(gaps, 1) if step != 2 or correction == "decoupled")
    spans = [set(row["versions"]) for row in run.rollouts if row["deferrals"]]
    if actor_kv == "keep":  # a token is as old as the oldest weights that it was drawn over
        assert all(len(versions) == 1 for versions in spans)
        assert all(row["step"] - 1 - row["versions"][-1] == row["deferrals"] for row in run.rollouts if row["deferrals"])
    else:
        assert any(len(versions) > 1 for versions in spans)


def test_the_end_of_the_data_is_a_smaller_batch(workspace: Workspace) -> None:
    changes = {"steps": None, "data.max_rows": 20}
    run = run_ppo_ranks(overcommitted(workspace, "end", **changes))
    assert [len(batch) for batch in run.batches()] == [6, 6, 6, 2]
    assert sorted(run.tokens()) == list(range(20))


def test_adaptive_chunk_and_delta_run(workspace: Workspace) -> None:
    changes = {
        "overlap.chunk": [8, 2, 32],
        "overlap.delta": {"rule": "eq4", "initial": 2, "max": 4, "window": 1},
        "overlap.max_staleness": 2,
    }
    run = run_ppo_ranks(overcommitted(workspace, "adaptive", **changes))
    assert {line["chunk_tokens"] for line in run.metrics} >= {2, 8, 32}
    assert len({line["delta"] for line in run.metrics}) > 1
    assert all(line["delta_reason"] and line["chunk_reason"] for line in run.metrics)
    assert sorted(run.tokens()) == list(range(STEPS * BATCH))


MEASURED = {"rule": "measured", "initial": 2, "max": DELTA, "window": 1}


@pytest.mark.parametrize("placement", [DISAGGREGATED, {"mode": "disaggregated", "actor": {"dp": 2}}], ids=["1", "dp2"])
def test_delta_from_what_is_measured(workspace: Workspace, placement: dict[str, Any]) -> None:
    """Every rank must decide alike, or the ranks would admit other prompts and fail each other."""
    dp = placement.get("actor", {}).get("dp", 1)
    changes = {"overlap.delta": MEASURED, "overlap.max_staleness": 2, "rollout.forced_lengths": [12, 1.0]}
    config = overcommitted(workspace, f"measured-{dp}", **changes) | {"placement": placement}
    run = run_ppo_ranks(config)
    assert sorted(run.tokens()) == list(range(STEPS * BATCH))
    assert len({line["delta"] for line in run.metrics}) > 1 and min(line["ess"] for line in run.metrics) < 1
    ended = 0
    for line in run.metrics:
        begun, batch = ended, [row for row in run.rollouts if row["step"] == line["step"]]
        ended = max(begun, *(row["finish_clock"] for row in batch))
        # A sequence runs in every decode step from its first token on, so its end and its length tell in which.
        counts = [sum(_ran_at(row, clock) for row in run.rollouts) for clock in range(begun + 1, ended + 1)]
        assert line["tail_waste"] == pytest.approx(1 - fmean(counts) / max(counts) if counts else 0.0, abs=1e-12)
        assert line["length_gap"] == pytest.approx(1 - line["trained_len_mean"] / line["submitted_len_mean"])
    controller, ess = make_delta_controller(DeltaConfig(**MEASURED)), 1.0
    for line in run.metrics:
        assert line["delta"] == controller.value
        signals = StepSignals(line["reward_mean"], line["tail_waste"], ess, line["length_gap"])
        assert line["delta_reason"] == controller.observe(line["step"], signals).reason
        ess = line["ess"]


def _ran_at(row: dict[str, Any], clock: int) -> bool:
    return row["finish_clock"] - len(row["tokens"]) < clock <= row["finish_clock"]


@pytest.fixture(scope="module")
def backfilled(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(deep(workspace, "backfilled", **BACKFILL))


def test_with_backfill_every_prompt_is_trained_exactly_once(workspace: Workspace, backfilled: Outcome) -> None:
    assert Counter(row["seq_id"] for row in backfilled.rollouts) == {i: 1 for i in range(BACKFILLED * BATCH)}
    assert [len(batch) for batch in backfilled.batches()] == [BATCH] * BACKFILLED
    assert sum(line["backfilled"] for line in backfilled.metrics) > BATCH, "prompts enter within steps"
    assert max(line["carried"] for line in backfilled.metrics) <= BATCH
    assert max(row["deferrals"] for row in backfilled.rollouts) <= 4
    assert backfilled.metrics[-1]["carried"] == 0
    assert all(0 < line["packing_efficiency"] <= 1 > line["padding_saved"] > 0 for line in backfilled.metrics)
    assert_unfolds_alike(deep(workspace, "backfilled", **BACKFILL), backfilled, VirtualRun, OrderedRun)


def test_few_slots_change_nothing(workspace: Workspace, backfilled: Outcome) -> None:
    """Nine slots of half of a cache are four of a whole one."""
    few = {"placement": {"mode": "disaggregated", "actor": {"tp": 2}}, "runtime.kv_cache_mb": 0.3}
    assert_same(run_ppo_ranks(deep(workspace, "few-slots", **BACKFILL | few)), backfilled)


def test_a_chunk_that_adapts_changes_no_batch(workspace: Workspace, backfilled: Outcome) -> None:
    chunk = [EVERY, 3, 64]
    run = run_ppo_ranks(deep(workspace, "backfill-adaptive", **BACKFILL | {"overlap.chunk": chunk}))
    assert {line["chunk_tokens"] for line in run.metrics} == {3, EVERY}
    assert_same(run, backfilled)
