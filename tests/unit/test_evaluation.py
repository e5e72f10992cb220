"""Means over prompts, their standard errors, and paired differences."""

from __future__ import annotations

import math

import pytest

from oppo_megatron.control.estimates import estimate, paired_difference
from oppo_megatron.evaluation.grading import LENGTH, Answer, Judged, as_json, as_table


def judged(name: str, values: list[list[float]]) -> Judged:
    answers = [
        Answer(row, sample, f"prompt {row}", "text", "eos" if value else "length", 10 * (row + 1), {})
        for row, samples in enumerate(values)
        for sample, value in enumerate(samples)
    ]
    return Judged(name, answers, [{"right": value} for samples in values for value in samples])


def test_a_prompt_counts_once_however_many_responses_it_has() -> None:
    found = estimate({0: [1.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 0.0]})
    assert (found.mean, found.n) == (0.5, 3)
    assert found.error == pytest.approx(0.5 / math.sqrt(3))
    assert estimate({0: [1.0, 0.0]}).error is None


def test_the_difference_is_taken_prompt_by_prompt() -> None:
    before, after = {0: [0.0], 1: [10.0], 2: [20.0]}, {0: [1.0], 1: [11.0], 2: [21.0]}
    found = paired_difference(before, after)
    assert (found.mean, found.error, found.n) == (1.0, 0.0, 3), "prompts differ much, the policies by one everywhere"


def test_table_and_json_have_the_same_figures() -> None:
    policies = [judged("before", [[0.0], [1.0]]), judged("after", [[1.0], [1.0]])]
    first, second = as_json(policies, ["right"], {"seed": 0})["policies"]
    assert first["metrics"]["right"] == {"mean": 0.5, "error": 0.5, "n": 2} and "difference" not in first
    assert second["difference"]["right"] == {"mean": 0.5, "error": 0.5, "n": 2}
    assert second["metrics"][LENGTH]["mean"] == 15.0 and first["finish_reasons"] == {"eos": 0.5, "length": 0.5}
    head, right, length, *ended = as_table(policies, ["right"]).splitlines()
    assert head.split() == ["before", "after", "minus", "before"]
    assert right.split() == ["right", "0.5", "±", "0.5", "1", "±", "0", "+0.5", "±", "0.5"]
    assert length.startswith(LENGTH) and [line.split()[2] for line in ended] == ["eos", "length"]
