"""Runs in virtual time against real ones: every rule of delta, and seconds from a run's own costs; the matrix has layouts."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.control.delta_controllers import RULES
from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.sim.runs.virtual import VirtualRun
from tests.support.ordered import OrderedRun
from tests.support.ppo import SHAPE, Workspace, run_ppo_ranks
from tests.support.virtual import assert_unfolds_alike

DELTA = {"initial": 3, "max": 6, "window": 1}
FORCED = {
    "rollout.forced_lengths": [12, 1.0], "overlap.chunk": [8, 4],
    "placement": {"mode": "colocated", "actor": {"dp": 2}, "scorer": {"dp": 2}},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("rule", "changes"), [*((rule, {}) for rule in RULES), ("measured", FORCED)])
def test_batches_and_deferrals_are_those_of_a_real_run(workspace: Workspace, rule: str, changes: dict[str, Any]) -> None:
    both = {"overlap.intra": True, "overlap.inter": True, "steps": 8, "overlap.delta": DELTA | {"rule": rule}}
    config = workspace.config(f"{rule}-{len(changes)}", **both | changes)
    outcome = run_ppo_ranks(config)
    assert any(row["deferrals"] for row in outcome.rollouts), "some should be carried"
    assert_unfolds_alike(config, outcome, VirtualRun, OrderedRun)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["sequential", "full", "tp 2"])
def test_a_step_takes_what_the_run_s_own_costs_say(workspace: Workspace, layout: str) -> None:
    """Compare mean steps of a model whose actions take most of a step; without the reading they would be some 30 % short."""
    shape = SHAPE | {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024, "initializer_range": 0.02}
    tensor = {"mode": "colocated", "actor": {"tp": 2}, "scorer": {"tp": 2}}
    config = workspace.config(
        f"own costs {layout}", steps=8, placement=tensor if layout == "tp 2" else {"mode": "disaggregated"},
        **{f"{role}.init": shape for role in ("actor", "critic", "reward")},
        **{f"overlap.{name}": layout != "sequential" for name in ("intra", "inter")},
        **{"overlap.delta": DELTA | {"rule": "fixed"}, "overlap.chunk": 16, "rollout.forced_lengths": [32, 0.8],
           "rollout.batch_size": 12, "rollout.max_response_tokens": 96},
    )  # fmt: skip
    run = Path(config["run_dir"])
    measured = run_ppo_ranks(config).metrics
    out = run.with_name(f"{run.name} played")
    arguments = ["plan", "simulate", str(run / "config.yaml"), "--steps", "8", "--calibrate", str(run), "--out", str(out)]
    assert main(arguments) == 0
    played = read_metrics(out / "metrics.jsonl")
    assert [line["tokens"] for line in played] == [line["tokens"] for line in measured]
    seconds = [fmean(line["step_s"] for line in lines[1:]) for lines in (measured, played)]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.25)
