"""Continuous generation: equal to the synchronous run without run-ahead, repeatable from its log, bounded in staleness."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_resume import assert_bit_equal, checkpoints, resumed, rewound, stop
from tests.support.ppo import Workspace, assert_same, run_ppo_ranks, weight_distance

STEPS, BATCH = 6, 6
FIXED = {"rule": "fixed", "initial": 0, "max": 0}
GRPO = {"algorithm": {"preset": "grpo"}, "critic": None, "rollout.group_size": 3}
SINGLE = {"mode": "single"}
PLACEMENTS = {
    "1": SINGLE,
    "1+1": {"mode": "disaggregated"},
    "dp2+1": {"mode": "disaggregated", "actor": {"dp": 2}},
    "tp2 shared": {"mode": "colocated", "actor": {"tp": 2}},
    "pp2+1": {"mode": "disaggregated", "actor": {"pp": 2}},
}


def continuous(workspace: Workspace, name: str, ahead: int, **changes: Any) -> dict[str, Any]:
    """`ahead`: batches."""
    settings = {
        "overlap.intra": True, "overlap.inter": True, "overlap.continuous": {"lag_steps": 5}, "steps": STEPS,
        "overlap.max_staleness": max(1, ahead),
    }  # fmt: skip
    if not ahead:
        settings["overlap.delta"] = FIXED
    return workspace.config(name, **(settings | changes))


def installs(config: dict[str, Any]) -> list[dict[str, int]]:
    return [json.loads(line) for line in (Path(config["run_dir"]) / "installs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("lag", [0, 9, "asap"])
@pytest.mark.parametrize("algorithm", [{}, GRPO], ids=["ppo", "grpo"])
def test_without_run_ahead_it_is_the_synchronous_run(workspace: Workspace, algorithm: dict[str, Any], lag: Any) -> None:
    plain = run_ppo_ranks(workspace.config(f"plain-{lag}-{len(algorithm)}", steps=STEPS, **algorithm, **{"overlap.intra": True}))
    changes = {"overlap.continuous": {"lag_steps": lag}}
    ours = run_ppo_ranks(continuous(workspace, f"ahead0-{lag}-{len(algorithm)}", 0, **algorithm, **changes))
    assert ours.tokens() == plain.tokens() and ours.batches() == plain.batches()
    assert weight_distance(ours.actor, plain.actor) == 0.0
    assert weight_distance(ours.critic, plain.critic) == 0.0


@pytest.mark.parametrize("ahead", [1, 2])
def test_staleness_is_bounded_and_every_prompt_trained_once(workspace: Workspace, ahead: int) -> None:
    config = continuous(workspace, f"bounded-{ahead}", ahead, **GRPO)
    run = run_ppo_ranks(config)
    assert Counter(row["seq_id"] for row in run.rollouts) == {i: 1 for i in range(STEPS * BATCH)}
    for row in run.rollouts:
        stale = row["step"] - 1 - row["versions"][0]
        assert 0 <= stale <= row["deferrals"] <= ahead
        assert row["versions"] == sorted(row["versions"])
    assert max(row["step"] - 1 - row["versions"][0] for row in run.rollouts) == ahead
    assert [line["version"] for line in installs(config)] == list(range(1, STEPS + 1))


def test_a_log_repeats_the_run_in_another_placement(workspace: Workspace) -> None:
    live = continuous(workspace, "live", 2, **GRPO, **{"overlap.continuous": {"lag_steps": "asap"}, "overlap.chunk": 4})
    first = run_ppo_ranks(live)
    log = Path(live["run_dir"]) / "installs.jsonl"
    for name, placement in PLACEMENTS.items():
        again = continuous(
            workspace, f"again-{name}", 2, **GRPO,
            **{"overlap.continuous": {"replay": str(log)}, "placement": placement, "overlap.chunk": 7},
        )  # fmt: skip
        assert_same(run_ppo_ranks(again), first)
        assert installs(again) == installs(live)


APART = {
    "1 | 1 | 1": ({"mode": "disaggregated"}, {"ranks": "2"}),
    "1 | 1 | tp2": ({"mode": "disaggregated"}, {"ranks": "2-3", "tp": 2}),
    "pp2 shared | dp2": ({"mode": "colocated", "actor": {"pp": 2}}, {"ranks": "2-3", "pp": 1}),
    "dp2 | scorer trains": ({"mode": "disaggregated", "actor": {"dp": 2}}, {"ranks": "2"}),
}


@pytest.mark.parametrize("name", APART)
def test_training_on_other_ranks_is_the_same_run(workspace: Workspace, name: str) -> None:
    placement, train = APART[name]
    changes: dict[str, Any] = {**GRPO, "overlap.intra": True, "steps": STEPS}
    plain = run_ppo_ranks(workspace.config(f"apart-plain-{name}", **changes))
    ours = run_ppo_ranks(workspace.config(f"apart-{name}", **changes, **{"placement": placement, "actor.train": train}))
    assert_same(ours, plain)


@pytest.mark.parametrize("install", ["staged", "pause"])
@pytest.mark.parametrize("name", APART)
def test_decoding_goes_on_while_other_ranks_train(workspace: Workspace, name: str, install: str) -> None:
    placement, train = APART[name]
    rules = {"lag_steps": "asap", "install": install}
    live = continuous(
        workspace, f"live-{name}-{install}", 2, **GRPO,
        **{"overlap.continuous": rules, "overlap.chunk": 4, "placement": placement, "actor.train": train},
    )  # fmt: skip
    run = run_ppo_ranks(live)
    again = continuous(workspace, f"replay-{name}-{install}", 2, **GRPO, **{
        "overlap.continuous": {"replay": str(Path(live["run_dir"]) / "installs.jsonl")},
    })  # fmt: skip
    assert_same(run_ppo_ranks(again), run)
    assert installs(again) == installs(live)


REDRAW = {"overlap.carry": "redraw"}


@pytest.mark.parametrize("rules", [None, {"lag_steps": 7}, {"lag_steps": "asap"}], ids=["in turns", "lag 7", "asap"])
@pytest.mark.parametrize("name", ["1", *APART])
def test_no_token_is_stale_if_they_are_drawn_again(workspace: Workspace, name: str, rules: Any) -> None:
    placement, train = APART.get(name, (SINGLE, {}))
    changes = {**REDRAW, "overlap.continuous": rules, "placement": placement, "actor.train": train, "actor.optimizer.lr": 1e-4}
    config = continuous(workspace, f"redraw-{name}-{rules}", 2, **GRPO, **changes, **{"overlap.chunk": 4, "steps": 4})
    config["overlap"]["delta"] = {"rule": "fixed", "initial": 4, "max": 4}
    run = run_ppo_ranks(config)
    assert sorted(run.tokens()) == list(range(4 * BATCH))
    assert all(set(row["versions"]) == {row["step"] - 1} for row in run.rollouts), "each token is the training policy's"
    assert any(row["deferrals"] for row in run.rollouts) and max(line["logprob_gap"] for line in run.metrics) < 1e-4
    kept = [line["tokens_kept"] for line in run.metrics if "tokens_kept" in line]
    assert kept and all(0 <= share <= 1 for share in kept) and 0 < sum(kept) < len(kept)


STOPPED: dict[str, dict[str, Any]] = {
    "1": {}, "1 | 1 | 1": {"placement": APART["1 | 1 | 1"][0], "actor.train": APART["1 | 1 | 1"][1]},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_or_killed_run_goes_on_as_the_run_that_never_stopped(workspace: Workspace, name: str, kv: str) -> None:
    """Stopped anywhere, also with batches in the queue, and killed after any step, to resume from that step's checkpoint."""
    changes = {
        **GRPO, **STOPPED[name], "overlap.continuous": {"lag_steps": 11}, "overlap.chunk": 3, "overlap.carry": kv,
        "checkpoint": {"every_steps": 1, "keep": 9}, "overlap.backfill": False,
    }  # fmt: skip
    config = continuous(workspace, f"steps-{name}-{kv}", 2, **changes)
    plain = run_ppo_ranks(config)
    clocks = []
    for rounds in (2, 5, 8, 11):
        stopped = continuous(workspace, f"stopped-{name}-{kv}-{rounds}", 2, **changes)
        stop(stopped, rounds=rounds)
        clocks.append("clock" in checkpoints(stopped)[-1])
        assert_bit_equal(resumed(stopped), plain)
        assert installs(stopped) == installs(config)
    assert any(clocks)
    states = [json.loads(path.read_text()) for path in Path(config["run_dir"]).glob("checkpoints/*/state.json")]
    assert any(state["queue"] for state in states), "some checkpoint should hold a batch that is not trained yet"
    for left in range(1, STEPS):
        assert_bit_equal(resumed(rewound(config, str(left), left)), plain)
