"""What the actor's ranks do where they would wait for scores: begin the update, score what lies on them; it comes to the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.rundir.trace import Span, read_trace
from tests.support.ppo import Outcome, Workspace, read_outcome, run_ppo_ranks, weight_distance

PAIR = {"placement.mode": "disaggregated"}
FULL = {"overlap.intra": True, "overlap.inter": True, "overlap.delta": {"rule": "fixed", "initial": 2, "max": 2}}


def both(workspace: Workspace, name: str, **changes: Any) -> tuple[Outcome, Outcome]:
    """The run whose actor begins its update ahead of the last scores, and the run without."""
    found = []
    for waits in ([], ["scores"]):
        config = workspace.config(f"{name}-{not waits}", **PAIR, **FULL, **changes, **{"debug.wait_for": waits})
        run = Path(config["run_dir"])
        found.append(read_outcome(run) if (run / "summary.json").exists() else run_ppo_ranks(config))
    return found[0], found[1]


def spans_of(workspace: Workspace, name: str, step: int) -> list[Span]:
    """Update and wait for scores on the actor's rank, in the order of time."""
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
    run_ppo_ranks(workspace.config("plain", **PAIR))
    assert [span.name for span in spans_of(workspace, "plain", 2)] == ["wait_scores", "update"]


def test_a_batch_that_is_not_trained_leaves_nothing_begun(workspace: Workspace) -> None:
    """Decoding goes on from the weights as they were, and the next update is another's."""
    found = []
    for value in (True, False):
        options = {"name": f"second step {value}", "good": 6, "bad": 6}
        part = {"kind": "python", "entry_point": "tests.e2e.rewards:breaks", "options": options}
        changes = {"reward": None, "rewards": [part], "guards": {"action": "skip"}}
        changes["debug.wait_for"] = [] if value else ["scores"]
        found.append(run_ppo_ranks(workspace.config(f"skip-{value}", **PAIR, **FULL, **changes)))
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
