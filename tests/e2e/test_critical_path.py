"""The critical path of real runs, by their traces: hidden and exposed seconds, and updates that begin before the last scores."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.rundir.trace import Span, read_trace
from tests.support.layouts import deep
from tests.support.ppo import Outcome, Workspace, read_outcome, run_ppo_ranks, weight_distance
from tests.support.ranks import run_ranks

SLOW_S = 0.6
PAIR = {"placement.mode": "disaggregated", "overlap.intra": True}


def run(workspace: Workspace, name: str, ranks: int, **changes: Any) -> tuple[list[dict[str, Any]], list[Counter[str]]]:
    config = deep(workspace, name, steps=3, **changes)
    run_ranks(ranks, "tests.e2e.jobs:train_with_a_slow_critic", config=config, seconds=SLOW_S)
    lines = read_metrics(Path(config["run_dir"]) / "metrics.jsonl")
    spans = [Counter[str]() for _ in lines]
    for span in read_trace(Path(config["run_dir"]) / "trace.json"):
        if span.rank == 0 and span.role == "actor":
            spans[span.step - 1][span.name] += span.end - span.start
    for line in lines:
        assert line["critic_update_s"] > SLOW_S
        assert line["critic_exposed_s"] + line["critic_hidden_s"] == pytest.approx(line["critic_update_s"])
        assert min(line["critic_exposed_s"], line["critic_hidden_s"], line["score_exposed_s"]) >= 0
        assert line["score_hidden_s"] == pytest.approx(max(0.0, line["score_busy_s"] - line["score_exposed_s"]))
    return lines, spans


def test_a_hidden_update_is_exposed_where_the_actor_waits_for_it(workspace: Workspace) -> None:
    lines, spans = run(workspace, "hidden", 2, **PAIR)
    for before, line, seconds in zip(lines, lines[1:], spans[1:], strict=False):
        assert before["critic_exposed_s"] + line["score_exposed_s"] == pytest.approx(seconds["wait_scores"], abs=1e-4)
        busy_elsewhere = seconds["decode"] + spans[line["step"] - 2]["update"]
        assert before["critic_exposed_s"] > SLOW_S / 4 or busy_elsewhere > SLOW_S / 2
        assert before["critic_hidden_s"] > 0, "it began with the actor's own update"
    assert lines[0]["score_exposed_s"] == pytest.approx(spans[0]["wait_scores"], abs=1e-4), "no update is before step 1"
    assert lines[-1]["critic_exposed_s"] == pytest.approx(spans[-1]["wait_update"], abs=1e-3)


def test_a_critic_that_is_waited_for_is_exposed_but_for_the_actors_own_update(workspace: Workspace) -> None:
    lines, spans = run(workspace, "waited", 2, **PAIR, **{"overlap.without": ["critic"]})
    for line, seconds in zip(lines, spans, strict=True):
        assert line["critic_exposed_s"] == pytest.approx(min(seconds["wait_update"], line["critic_update_s"]), abs=1e-3)
        assert line["score_exposed_s"] == pytest.approx(seconds["wait_scores"], abs=1e-4)


def test_no_figure_goes_by_a_clock_that_somebody_sets(workspace: Workspace) -> None:
    """A step that took less than no time has stopped runs, by way of the chunk's tuner."""
    config = workspace.config("set-back", **{"overlap.intra": True, "overlap.chunk": [7, 16, 32, 64]})
    run_ranks(1, "tests.e2e.jobs:train_while_the_clock_is_set_back", config=config)
    lines = read_metrics(Path(config["run_dir"]) / "metrics.jsonl")
    times = [line[name] for line in lines for name in line if name.endswith("_s") and name != "idle_s"]
    assert len(lines) == 3 and all(0 <= seconds < 60 for seconds in times)
    assert all(0 <= span.end - span.start < 60 for span in read_trace(Path(config["run_dir"]) / "trace.json"))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_on_the_actors_ranks_all_of_the_update_is_exposed(workspace: Workspace, ranks: int) -> None:
    mode = {"mode": "colocated", "actor": {"pp": ranks}}
    lines, _ = run(workspace, f"colocated-{ranks}", ranks, placement=mode, **{"overlap.intra": True})
    assert all(line["critic_hidden_s"] == 0 for line in lines)


DISAGGREGATED = {"placement.mode": "disaggregated"}
FULL = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 2, "max": 2}}


def both(workspace: Workspace, name: str, **changes: Any) -> tuple[Outcome, Outcome]:
    found = []
    for waits in ([], ["scores"]):
        config = workspace.config(f"{name}-{not waits}", **DISAGGREGATED, **FULL, **changes, **{"overlap.without": waits})
        run = Path(config["run_dir"])
        found.append(read_outcome(run) if (run / "summary.json").exists() else run_ppo_ranks(config))
    return found[0], found[1]


def spans_of(workspace: Workspace, name: str, step: int) -> list[Span]:
    spans = [
        span
        for span in read_trace(workspace.root / "runs" / name / "trace.json")
        if span.rank == 0 and span.role == "actor" and span.step == step and span.name in ("update", "wait_scores")
    ]
    return sorted(spans, key=lambda span: span.start)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pair", {}),
        pytest.param("whole", {"ppo.epochs": 1, "ppo.minibatches": 1, "runtime.micro_batch_tokens": 150}, marks=pytest.mark.long),
        ("decoupled", {"ppo.staleness": "decoupled"}),
        pytest.param("tp", {"placement.actor": {"tp": 2}}, marks=pytest.mark.long),
        ("dp", {"placement.actor": {"dp": 2}}),
        pytest.param(
            "training-layout", {"placement.actor": {"tp": 2}, "actor.train": {"tp": 1, "dp": 2}}, marks=pytest.mark.long
        ),
        pytest.param("stages", {"placement.actor": {"pp": 2}}, marks=pytest.mark.long),
    ],
)
def test_the_run_is_the_same_to_the_bit(workspace: Workspace, name: str, changes: dict[str, Any]) -> None:
    ahead, after = both(workspace, name, **changes)
    assert any(int(times) > 0 for line in ahead.metrics for times in line["deferred"]), "some were carried"
    assert ahead.tokens() == after.tokens() and ahead.batches() == after.batches()
    assert weight_distance(ahead.actor, after.actor) == weight_distance(ahead.critic, after.critic) == 0.0
    for one, other in zip(ahead.metrics, after.metrics, strict=True):
        for figure in ("actor_loss", "grad_norm", "ess", "logprob_gap", "kl_mean", "critic_loss"):
            assert one[figure] == other[figure], figure


def test_the_update_begins_before_the_wait_for_scores(workspace: Workspace) -> None:
    both(workspace, "pair")
    for step in (1, 2, 3):
        assert [s.name for s in spans_of(workspace, "pair-True", step)] == ["update", "wait_scores", "update"]
        assert [s.name for s in spans_of(workspace, "pair-False", step)] == ["wait_scores", "update"]


def test_plain_ppo_waits_for_all_scores_first(workspace: Workspace) -> None:
    run_ppo_ranks(workspace.config("plain", **DISAGGREGATED))
    assert [span.name for span in spans_of(workspace, "plain", 2)] == ["wait_scores", "update"]


def test_a_batch_that_is_not_trained_leaves_nothing_begun(workspace: Workspace) -> None:
    found = []
    for value in (True, False):
        options = {"name": f"second step {value}", "good": 6, "bad": 6}
        part = {"kind": "python", "entry_point": "tests.e2e.rewards:breaks", "options": options}
        changes = {"reward": None, "rewards": [part], "guards": {"action": "skip"}}
        changes["overlap.without"] = [] if value else ["scores"]
        found.append(run_ppo_ranks(workspace.config(f"skip-{value}", **DISAGGREGATED, **FULL, **changes)))
    for outcome in found:
        assert [line["skipped"] is not None for line in outcome.metrics] == [False, True, False]
    ahead, after = found
    assert ahead.tokens() == after.tokens()
    assert weight_distance(ahead.actor, after.actor) == weight_distance(ahead.critic, after.critic) == 0.0


def test_a_reference_with_the_actor_reads_the_batch_last(workspace: Workspace) -> None:
    placement = {"mode": "disaggregated", "reference": "actor"}
    run_ppo_ranks(workspace.config("beside", **FULL, placement=placement))
    for step in (1, 2, 3):
        spans = [s for s in read_trace(workspace.root / "runs" / "beside" / "trace.json") if (s.rank, s.step) == (0, step)]
        decoded = max(span.end for span in spans if span.role == "actor" and span.name == "decode")
        read = [span.start for span in spans if span.role == "reference"]
        assert read and min(read) > decoded
