"""When a run ends for a held-out metric."""

from __future__ import annotations

import json
import math

import pytest

from oppo_megatron.config.evaluation import EarlyStopConfig
from oppo_megatron.control.estimates import Best, EarlyStop


def run(values: list[float], **settings: object) -> EarlyStop:
    stop = EarlyStop(EarlyStopConfig.model_validate({"metric": "accuracy", **settings}))
    for step, value in enumerate(values):
        assert not stop.due, f"due before step {step}"
        stop.observe(step, value)
    return stop


@pytest.mark.parametrize(
    ("values", "settings", "due", "best"),
    [
        ([0.1, 0.2, 0.3], {"patience": 1}, False, Best(2, 0.3)),
        ([0.1, 0.2, 0.2], {"patience": 1}, True, Best(1, 0.2)),
        ([0.1, 0.2, 0.1, 0.15], {"patience": 3}, False, Best(1, 0.2)),
        ([0.1, 0.2, 0.1, 0.15, 0.2], {"patience": 3}, True, Best(1, 0.2)),
        ([3.0, 2.0, 2.5], {"patience": 1, "metric": "min accuracy"}, True, Best(1, 2.0)),
        ([math.nan, 0.1, math.nan], {"patience": 2}, False, Best(1, 0.1)),
    ],
)
def test_it_is_due_after_as_many_that_are_no_better(
    values: list[float], settings: dict[str, object], due: bool, best: Best
) -> None:
    stop = run(values, **settings)
    assert (stop.due, stop.best) == (due, best)


def test_it_goes_on_from_its_state_as_if_nothing_had_been() -> None:
    values = [0.1, 0.3, 0.2, 0.25, 0.1]
    whole = run(values, patience=3)
    first = run(values[:3], patience=3)
    second = EarlyStop(first.config)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in (3, 4):
        second.observe(step, values[step])
    assert second.state_dict() == whole.state_dict() and second.due
    assert second.describe() == "stopped early at step 4: accuracy 0.1, no better in 3 evaluations; best 0.3 at step 1"
