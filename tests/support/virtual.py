"""A run in virtual time beside a real one of the same configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from oppo_megatron.records import StepSignals
from oppo_megatron.sim.runs.step_costs import StepCosts
from oppo_megatron.sim.runs.virtual import VirtualRun, metrics_lines
from tests.support.configs import run_of
from tests.support.ppo import Outcome

COUNTED = (
    "tokens", "prefilled_tokens", "forked_tokens", "delta", "deferred", "carried", "carried_finished", "backfilled",
    "trained_len_max",
)  # fmt: skip
MEASURED = (
    "running_mean", "tail_waste", "prompt_len_mean", "trained_len_mean", "submitted_len_mean", "length_gap",
    "group_length_gap",
)  # fmt: skip


def shown(outcome: Outcome) -> Callable[[int, StepSignals], StepSignals]:
    def signals(step: int, seen: StepSignals) -> StepSignals:
        ess = outcome.metrics[step - 2].get("ess", 1.0) if step > 1 else 1.0
        return replace(seen, reward_mean=outcome.metrics[step - 1]["reward_mean"], ess=ess)

    return signals


def assert_unfolds_alike(config: dict[str, Any], outcome: Outcome, *players: type[VirtualRun]) -> None:
    parsed = run_of(config)
    rows = {row["seq_id"]: row for row in [*outcome.rollouts, *outcome.greedy]}
    prompts = [len(rows[seq_id]["prompt_tokens"]) for seq_id in range(len(rows))]
    lengths = {seq_id: len(row["tokens"]) for seq_id, row in rows.items()}
    for player in players or (VirtualRun,):
        run = player(parsed, StepCosts(), lengths.__getitem__, prompt_tokens=prompts, signals=shown(outcome))
        steps = list(run.steps(len(outcome.metrics)))
        assert [step.seq_ids.tolist() for step in steps] == outcome.batches()
        deferrals = [times for step in steps for times in step.deferrals.tolist()]
        assert deferrals == [row["deferrals"] for row in outcome.rollouts]
        for step, line, made in zip(steps, outcome.metrics, metrics_lines(steps), strict=True):
            batch = [row for row in outcome.rollouts if row["step"] == step.step]
            assert max(row["finish_clock"] for row in batch) <= step.clock
            assert {key: made[key] for key in COUNTED} == {key: line[key] for key in COUNTED}, step.step
            assert {k: made[k] for k in MEASURED} == pytest.approx({k: line[k] for k in MEASURED}, abs=1e-8), step.step
            reason = made["delta_reason"].replace("reward 0 ", "")
            assert reason == line["delta_reason"]
