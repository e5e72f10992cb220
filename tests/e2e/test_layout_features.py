"""What may be combined with a layout: overcommitment, decode micro-batches, other layouts and options of the update.

As in `test_layouts`, every run is compared with one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.layouts import assert_same, deep
from tests.support.ppo import Outcome, Workspace, read_outcome, run_ppo_ranks
from tests.support.ranks import run_ranks

OVERCOMMITTED = {
    "overlap.intra": True,
    "overlap.inter": True,
    "overlap.delta": {"rule": "fixed", "initial": 4, "max": 4},
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace.create(tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def plain(workspace: Workspace) -> Outcome:
    return run_ppo_ranks(deep(workspace, "plain"))


@pytest.fixture(scope="module")
def overcommitted(workspace: Workspace) -> Outcome:
    outcome = run_ppo_ranks(deep(workspace, "overcommitted", **OVERCOMMITTED))
    assert any(row["deferrals"] for row in outcome.rollouts), "nothing was deferred: the comparison would say nothing"
    return outcome


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(
            "pp2-m3",
            {"placement": {"mode": "colocated", "actor": {"pp": 2}}, "overlap.weave": [3, "auto"]},
            marks=pytest.mark.long,
        ),
        pytest.param("dp2", {"placement": {"mode": "colocated", "actor": {"dp": 2}}}, marks=pytest.mark.long),
        ("dp2-streamed", {"placement": {"mode": "disaggregated", "actor": {"dp": 2}}, "overlap.chunk.tokens": 16}),
        pytest.param(
            "pp2-dp2-m2",
            {
                "placement": {"mode": "colocated", "actor": {"pp": 2, "dp": 2}},
                "overlap.weave": [2, 64],
            },
            marks=pytest.mark.long,
        ),
    ],
)
def test_overcommitment_cuts_every_layout_at_the_same_decode_step(
    workspace: Workspace, overcommitted: Outcome, name: str, changes: dict[str, Any]
) -> None:
    assert_same(run_ppo_ranks(deep(workspace, name, **OVERCOMMITTED, **changes)), overcommitted)


@pytest.mark.parametrize(
    ("name", "placement", "micro_batches"),
    [
        ("kept-dp2", {"mode": "colocated", "actor": {"dp": 2}}, 1),
        pytest.param(
            "kept-pp2-dp2-m3", {"mode": "disaggregated", "actor": {"pp": 2, "dp": 2}}, 3, marks=pytest.mark.long
        ),
    ],
)
def test_a_kept_cache_outlives_an_end_that_was_cut_off(
    workspace: Workspace, name: str, placement: dict[str, Any], micro_batches: int
) -> None:
    """A replica decodes on while another completes the batch: what ended too late goes on, from the cache it had.

    Replicas divide the log-probs of the step's start, which its stale tokens are weighed by.
    """
    changes = OVERCOMMITTED | {"overlap.actor_kv": "keep", "ppo.staleness": "decoupled"}
    plain = run_ppo_ranks(deep(workspace, f"{name}-plain", **changes))
    changes |= {"placement": placement, "overlap.weave": [micro_batches, "auto"]}
    outcome = run_ppo_ranks(deep(workspace, name, **changes))
    assert_same(outcome, plain)
    weights, expected = ([line["importance_weight_mean"] for line in o.metrics] for o in (outcome, plain))
    assert weights == pytest.approx(expected, abs=1e-4) and max(abs(weight - 1) for weight in weights) > 1e-3


@pytest.mark.parametrize("schedule", ["intra", "woven"])
def test_woven_and_unwoven_train_alike(workspace: Workspace, plain: Outcome, schedule: str) -> None:
    placement = {"mode": "colocated", "actor": {"pp": 2}}
    changes = {"overlap.intra": True, "overlap.schedule": schedule, "placement": placement}
    assert_same(run_ppo_ranks(deep(workspace, f"schedule-{schedule}", **changes)), plain)


def test_scorers_on_ranks_of_their_own(workspace: Workspace, plain: Outcome) -> None:
    """Reward on one rank, critic on another, reference on the actor's."""
    config = deep(
        workspace, "split", placement={"mode": "disaggregated", "actor": {"pp": 2}}, **{"overlap.intra": True}
    )
    config["reward"]["ranks"] = "2"
    config["critic"]["ranks"] = "3"
    config["reference"] = {"init": config["actor"]["init"], "ranks": "0-1", "parallel": {"tp": 2}}
    assert_same(run_ppo_ranks(config), plain)


def test_a_tuned_chunk_is_the_same_for_scorers_partly_on_the_actors_ranks(workspace: Workspace, plain: Outcome) -> None:
    """The reward model's stages are on a rank that decodes and on one that does not: both plan its rounds."""
    chunk = {"overlap.chunk": {"tokens": 7, "adaptive": [7, 20]}, "runtime.timeout_s": 60.0}
    apart = {"placement": {"mode": "disaggregated", "actor": {"pp": 2}}, "overlap.intra": True}
    config = deep(workspace, "partly", **apart, **chunk)
    config["reward"] |= {"ranks": "1-2", "parallel": {"pp": 2}}
    planned = run_ranks(3, "tests.e2e.jobs:train_and_tell_chunks", config=config)
    assert planned[0] == planned[1] == planned[2] and set(planned[0]) == {7, 20}, "by round, on each rank"
    outcome = read_outcome(Path(config["run_dir"]))
    assert [line["chunk_tokens"] for line in outcome.metrics] == [7, 7, 20], "a search has tried another size"
    assert_same(outcome, plain)


@pytest.mark.parametrize(
    ("name", "generate", "train", "moves"),
    [
        ("pp2-tp2", {"pp": 2}, {"tp": 2, "pp": 1}, True),
        pytest.param("tp2-dp2", {"tp": 2}, {"tp": 1, "dp": 2}, False, marks=pytest.mark.long),
        pytest.param("dp2-pp2", {"dp": 2}, {"dp": 1, "pp": 2}, True, marks=pytest.mark.long),
        pytest.param("dp4-tp2-pp2", {"dp": 4}, {"tp": 2, "pp": 2, "dp": 1}, True, marks=pytest.mark.long),
        ("tp2-vpp2", {"tp": 2}, {"tp": 1, "pp": 2, "vpp": 2}, True),
        pytest.param("pp2-vpp2", {"pp": 2}, {"vpp": 2}, True, marks=pytest.mark.long),
        pytest.param("tp2-sp", {"tp": 2}, {"sequence_parallel": True}, False, marks=pytest.mark.long),
        pytest.param("pp2-full", {"pp": 2}, {"recompute": "full"}, False, marks=pytest.mark.long),
    ],
)
def test_updates_may_have_another_layout_than_decoding(
    workspace: Workspace, plain: Outcome, name: str, generate: dict[str, int], train: dict[str, Any], moves: bool
) -> None:
    """`moves`: whether weights have to cross between ranks; to decode a shard of what it trains, a rank needs no other."""
    placement = {"mode": "colocated", "actor": generate}
    config = deep(workspace, name, placement=placement, **{"overlap.intra": True})
    config["actor"]["train"] = train
    config["critic"]["train"] = train
    outcome = run_ppo_ranks(config)
    assert_same(outcome, plain)
    moved = {line["reallocated_bytes"] for line in outcome.metrics}
    assert (max(moved) > 0) == moves and len(moved) == 1
    assert all(line["reallocate_s"] < line["train_s"] for line in outcome.metrics)
