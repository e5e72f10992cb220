"""The chunk tuner against made-up costs."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oppo_megatron.control.chunk_tuner import ChunkTuner, DecodeLaw, StepCost


def drive(tuner: ChunkTuner, num_steps: int, cost: Callable[[int, int], float], first_step: int = 0) -> list[int]:
    """Run steps of 100 tokens costing `cost(step, chunk)` seconds per token; the chunk used in each."""
    used = []
    for step in range(first_step, first_step + num_steps):
        used.append(tuner.value)
        tuner.observe(step, StepCost(100 * cost(step, tuner.value), steps=10, tokens=100))
    return used


Cost = Callable[[int, int], float]
SEARCHES: list[tuple[list[int], int, int, Cost, list[int]]] = [
    # warm-up at 32, three candidates, settled on 64 until the next search 6 steps after the first began
    ([32, 16, 64], 1000, 6, lambda step, chunk: 64 / chunk, [32, 16, 32, 64, 64, 64, 64, 16, 32, 64, 64, 64]),
    # the warm-up step is not measured
    ([32, 16], 1000, 6, lambda step, chunk: 1e6 if step == 0 else 1 / chunk, [32, 16, 32, 32]),
    # the choice follows a change of costs
    ([8, 16], 1000, 5, lambda step, chunk: chunk if step < 5 else 100 - chunk, [8, 8, 16, 8, 8, 8, 8, 16, 16, 16]),
    # candidates are clipped, come once, and include the present value; a single one is no search
    ([5, 64, 16, 32, 16], 20, 6, lambda step, chunk: abs(chunk - 16) + 1, [5, 5, 16, 20, 16]),
    ([64, 16, 32], 8, 2, lambda step, chunk: 1.0, [8] * 6),
]


@pytest.mark.parametrize(("sizes", "longest", "period", "cost", "expected"), SEARCHES)
def test_a_search_after_the_warm_up_and_then_every_period(
    sizes: list[int], longest: int, period: int, cost: Cost, expected: list[int]
) -> None:
    tuner = ChunkTuner(sizes, longest, period)
    assert drive(tuner, len(expected), cost) == expected


def test_candidates_are_weighed_by_tokens() -> None:
    """Chunk 1 takes 10 s for 110 tokens, chunk 2 only 4 s, but for 20."""
    tuner = ChunkTuner([1, 2], longest=10)
    tuner.observe(0, StepCost(1.0, 1, 1))
    tuner.observe(1, StepCost(10.0, 1, 110))
    decision = tuner.observe(2, StepCost(4.0, 1, 20))
    assert decision.value == 1
    assert decision.reason == (
        "step 2: chunk 1 is the fastest (seconds until scored, relative to decoding such work: 1: 0.09091, 2: 0.2)"
    )


def test_a_step_without_tokens_is_tried_again() -> None:
    tuner = ChunkTuner([16, 32], longest=100)
    tuner.observe(0, StepCost(1.0, 5, 10))
    assert tuner.value == 16
    decision = tuner.observe(1, StepCost(0.0, 0, 0))
    assert (decision.value, decision.changed) == (16, False)
    tuner.observe(2, StepCost(2.0, 5, 10))
    assert tuner.observe(3, StepCost(1.0, 5, 10)).value == 32


def test_not_adaptive_is_constant() -> None:
    tuner = ChunkTuner([24], longest=100, period=1)
    decisions = [tuner.observe(step, StepCost(1.0 / (step + 1), 5, 10)) for step in range(20)]
    assert {(d.value, d.changed) for d in decisions} == {(24, False)}


@given(
    costs=st.dictionaries(st.integers(1, 50), st.floats(0.01, 10), min_size=1, max_size=6),
    period=st.integers(1, 12),
    longest=st.integers(1, 60),
)
def test_every_search_finds_the_cheapest(costs: dict[int, float], period: int, longest: int) -> None:
    tuner = ChunkTuner(list(costs), longest, period)
    reachable = {min(c, longest) for c in costs}
    cost = {chunk: costs.get(chunk, 20.0) for chunk in reachable}
    before = tuner.value
    for step in range(60):
        decision = tuner.observe(step, StepCost(7 * cost[tuner.value], 3, 7))
        assert decision.value in reachable
        assert decision.changed == (decision.value != before)
        before = decision.value
        if "fastest" in decision.reason:
            assert cost[decision.value] == pytest.approx(min(cost.values()), rel=1e-12)
            assert all(f"{c}: " in decision.reason for c in reachable)


def test_resume_keeps_the_choice_and_the_time_of_the_next_search() -> None:
    config = [16, 32]
    costs = {16: 2.0, 32: 1.0}
    whole, first, second = (ChunkTuner(config, longest=100, period=6) for _ in range(3))
    used = drive(first, 4, lambda step, chunk: costs[chunk])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    used += drive(second, 10, lambda step, chunk: costs[chunk], first_step=4)
    assert used == drive(whole, 14, lambda step, chunk: costs[chunk])


def test_resume_within_a_search_starts_it_again_after_a_warm_up() -> None:
    config = [16, 32]
    first, second = ChunkTuner(config, longest=100), ChunkTuner(config, longest=100)
    drive(first, 2, lambda step, chunk: 1.0)
    assert first.value == 32, "in the middle of the search"
    second.load_state_dict(first.state_dict())
    assert drive(second, 4, lambda step, chunk: 1e6 if step == 2 else 1.0 / chunk, first_step=2) == [16, 16, 32, 32]


def test_the_law_finds_what_a_step_and_a_token_take() -> None:
    law = DecodeLaw()
    for steps, tokens in [(16, 384), (16, 200), (16, 40), (7, 7)]:
        law.add(steps, tokens, 0.004 * steps + 0.0005 * tokens)
    assert law.seconds(10, 100) == pytest.approx(0.09, rel=1e-9)
    alike = DecodeLaw()
    for _ in range(3):
        alike.add(8, 64, 0.5)  # tells steps and tokens not apart
    assert alike.seconds(8, 128) == pytest.approx(1.0)
    assert DecodeLaw().seconds(5, 7) == 7.0


@given(rounds=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 4096), st.floats(0, 5)), min_size=1, max_size=9))
@example(rounds=[(1, 2, 5e-324)])
def test_the_law_never_says_that_work_takes_no_time(rounds: list[tuple[int, int, float]]) -> None:
    law = DecodeLaw()
    for steps, tokens, seconds in rounds:
        law.add(steps, max(steps, tokens), seconds)
    assert law.seconds(1, 1) > 0 and law.seconds(100, 3000) > 0


def test_a_candidate_is_not_judged_by_the_work_of_its_steps() -> None:
    """The smaller chunk is the better by a tenth, but its steps wait for one long response: three times the time a token."""
    tuner = ChunkTuner([16, 64], longest=1000)
    work = {0: (100, 1600), 1: (400, 1500), 2: (60, 1400)}  # decode steps, tokens
    for step, (steps, tokens) in work.items():
        decoding = 0.004 * steps + 0.0003 * tokens
        law = DecodeLaw()
        for share in (0.5, 0.3, 0.2):  # rounds with fewer and fewer rows
            law.add(steps // 3, int(share * tokens), 0.004 * (steps // 3) + 0.0003 * int(share * tokens))
        scoring = {16: 1.0, 64: 1.1}[tuner.value]
        decision = tuner.observe(step, StepCost(scoring * decoding, steps, tokens, law))
    assert decision.value == 16 and "16: 1, 64: 1.1" in decision.reason
