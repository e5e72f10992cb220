"""The chunk tuner against made-up costs, KL's coefficient against Ziegler et al. 2019, tail waste, early stopping, and guards."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oppo_megatron.chunks import Chunk, ChunkRow
from oppo_megatron.columns import columns_of
from oppo_megatron.config.evaluation import EarlyStopConfig
from oppo_megatron.config.ppo import KLConfig
from oppo_megatron.config.reliability import GuardsConfig
from oppo_megatron.control.chunk_tuner import ChunkTuner, DecodeLaw, Occupancy, StepCost, group_length_gap, length_gap
from oppo_megatron.control.delta_controllers import KLController
from oppo_megatron.control.estimates import Best, EarlyStop
from oppo_megatron.control.guards import CODE_SIZE, FIGURES, REMEDIES, RULES, Breach, Rules, decode, first
from oppo_megatron.records import Prompt, Rollout


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
    ([64, 16, 32], 8, 2, lambda step, chunk: 1.0, [8] * 6), ([24], 100, 1, lambda step, chunk: 1 / (step + 1), [24] * 20),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "longest", "period", "cost", "expected"), SEARCHES)
def test_a_search_after_the_warm_up_and_then_every_period(
    sizes: list[int], longest: int, period: int, cost: Cost, expected: list[int]
) -> None:
    assert drive(ChunkTuner(sizes, longest, period), len(expected), cost) == expected


def test_candidates_are_weighed_by_tokens_and_a_step_without_them_is_tried_again() -> None:
    """Chunk 1 takes 10 s for 110 tokens, chunk 2 only 4 s, but for 20."""
    tuner = ChunkTuner([1, 2], longest=10)
    tuner.observe(0, StepCost(1.0, 1, 1))
    tuner.observe(1, StepCost(10.0, 1, 110))
    decision = tuner.observe(2, StepCost(4.0, 1, 20))
    assert decision.value == 1
    fastest = "step 2: chunk 1 is the fastest (seconds until scored, relative to decoding such work: 1: 0.09091, 2: 0.2)"
    assert decision.reason == fastest
    tuner = ChunkTuner([16, 32], longest=100)
    tuner.observe(0, StepCost(1.0, 5, 10))
    assert tuner.value == 16
    decision = tuner.observe(1, StepCost(0.0, 0, 0))
    assert (decision.value, decision.changed) == (16, False)
    tuner.observe(2, StepCost(2.0, 5, 10))
    assert tuner.observe(3, StepCost(1.0, 5, 10)).value == 32


@given(
    costs=st.dictionaries(st.integers(1, 50), st.floats(0.01, 10), min_size=1, max_size=6), period=st.integers(1, 12),
    longest=st.integers(1, 60),
)  # fmt: skip
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


def test_resume_keeps_the_choice_and_starts_a_search_again_after_a_warm_up() -> None:
    costs = {16: 2.0, 32: 1.0}
    whole, first, second = (ChunkTuner([16, 32], longest=100, period=6) for _ in range(3))
    used = drive(first, 4, lambda step, chunk: costs[chunk])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    used += drive(second, 10, lambda step, chunk: costs[chunk], first_step=4)
    assert used == drive(whole, 14, lambda step, chunk: costs[chunk])
    first, second = (ChunkTuner([16, 32], longest=100) for _ in range(2))
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
        decision = tuner.observe(step, StepCost({16: 1.0, 64: 1.1}[tuner.value] * decoding, steps, tokens, law))
    assert decision.value == 16 and "16: 1, 64: 1.1" in decision.reason


def adaptive() -> KLController:
    return KLController(KLConfig(coefficient=0.1, target=6.0))


@pytest.mark.parametrize(("kl", "error"), [(6.0, 0), (6.6, 0.1), (5.4, -0.1), (7.2, 0.2), (60.0, 0.2), (0.0, -0.2), (-2.0, -0.2)])
def test_one_update_of_the_coefficient(kl: float, error: float) -> None:
    controller = adaptive()
    assert controller.observe(kl) == pytest.approx(0.1 * (1 + 0.1 * error), rel=1e-12)
    assert controller.value == controller.observe(6.0)


def test_the_coefficient_is_resumed_and_a_fixed_one_never_moves() -> None:
    first, second = adaptive(), adaptive()
    first.observe(20.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.value == first.value != 0.1
    fixed = KLController(KLConfig(coefficient=0.3))
    fixed.load_state_dict(first.state_dict())
    assert fixed.value == 0.3 and [fixed.observe(kl) for kl in (0.0, 100.0, -3.0)] == [0.3] * 3


def row(seq_id: int, num_tokens: int, finish_clock: int | None = None, offset: int = 0) -> ChunkRow:
    zeros = [0.0] * num_tokens
    return ChunkRow(seq_id, offset, [0] * num_tokens, zeros, zeros, version=0, finish_clock=finish_clock)


def rollout(num_tokens: int) -> Rollout:
    return Rollout(Prompt(0, 0, "", (1,)), 0, tokens=[0] * num_tokens)


def test_the_tail_is_what_the_longest_response_leaves_empty_and_length_gap_a_share_of_the_submitted_length() -> None:
    occupancy = Occupancy(10)
    occupancy.record(Chunk(0, 10, []))
    assert occupancy.tail_waste == 0, "nothing was decoded"
    occupancy.record(Chunk(1, 14, [row(0, 1, 11), row(1, 2, 12), row(2, 4)]))
    assert occupancy.tail_waste == 1 - 7 / (4 * 3)
    occupancy.record(Chunk(2, 20, [row(2, 6, 20, offset=4)]))
    assert occupancy.tail_waste == 1 - 13 / (10 * 3)
    entered, passed = Occupancy(0), Occupancy(0)
    entered.record(Chunk(1, 4, [row(0, 2, 2), row(1, 4), row(2, 2, 4)]))
    assert entered.tail_waste == 0, "row 2 takes the place that row 0 leaves empty at clock 2"
    passed.record(Chunk(1, 3, [row(0, 3, 3)]), 0)
    passed.record(Chunk(2, 12, [row(1, 4, 12)]), 8)
    assert (passed.num_steps, passed.tail_waste) == (7, 0), "a clock that passes by is no waste"
    short, long = [rollout(10), rollout(20)], [rollout(60)]
    assert length_gap(short, []) == 0
    assert length_gap(short, long) == pytest.approx(1 - 15 / 30)
    assert length_gap(long, short) == pytest.approx(1 - 60 / 30)
    assert length_gap(long, [rollout(0)]) == -1.0
    # Within groups it is to the longest of each: (10 + 30) / 2 of 30, and all as long as the longest.
    lengths = columns_of([rollout(10), rollout(30), rollout(8), rollout(8)]).response_tokens
    assert [group_length_gap(lengths, size) for size in (2, 4)] == pytest.approx([(1 / 3 + 0) / 2, 1 - 14 / 30])
    assert group_length_gap(lengths, 1) is None


def run(values: list[float], **settings: object) -> EarlyStop:
    stop = EarlyStop(EarlyStopConfig.model_validate({"metric": "accuracy", **settings}))
    for step, value in enumerate(values):
        assert not stop.due, f"due before step {step}"
        stop.observe(step, value)
    return stop


@pytest.mark.parametrize(("values", "settings", "due", "best"), [
    ([0.1, 0.2, 0.3], {"patience": 1}, False, Best(2, 0.3)), ([0.1, 0.2, 0.2], {"patience": 1}, True, Best(1, 0.2)),
    ([0.1, 0.2, 0.1, 0.15], {"patience": 3}, False, Best(1, 0.2)),
    ([0.1, 0.2, 0.1, 0.15, 0.2], {"patience": 3}, True, Best(1, 0.2)),
    ([3.0, 2.0, 2.5], {"patience": 1, "metric": "min accuracy"}, True, Best(1, 2.0)),
    ([math.nan, 0.1, math.nan], {"patience": 2}, False, Best(1, 0.1)),
])  # fmt: skip
def test_stopping_is_due_after_as_many_values_no_better(values: list[float], settings: dict, due: bool, best: Best) -> None:
    stop = run(values, **settings)
    assert (stop.due, stop.best) == (due, best)


def test_early_stopping_continues_from_its_state() -> None:
    values = [0.1, 0.3, 0.2, 0.25, 0.1]
    whole, first = run(values, patience=3), run(values[:3], patience=3)
    second = EarlyStop(first.config)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in (3, 4):
        second.observe(step, values[step])
    assert second.state_dict() == whole.state_dict() and second.due
    assert second.describe() == "stopped early at step 4: accuracy 0.1, no better in 3 evaluations; best 0.3 at step 1"


SOUND = {"kl_mean": 1, "ratio_max": 2, "ess": 0.9, "logprob_gap": 1e-6, "grad_norm": 3, "critic_loss": 0.1, "lr": 0}


def rules(gap: float | None = 1e-4, **settings: Any) -> Rules:
    return Rules(GuardsConfig(**settings), gap)


@pytest.mark.parametrize(("changed", "rule", "says"), [
    ({"kl_mean": 10.1}, "kl_mean", "kl_mean is 10.1, above guards.kl_mean 10"),
    ({"ratio_max": 4.5}, "ratio_max", "ratio_max is 4.5, above guards.ratio_max 4"),
    ({"ess": 0.49}, "ess", "ess is 0.49, below guards.ess 0.5"),
    ({"logprob_gap": 0.1}, "logprob_gap", "differs by 1.00e-01 between decoding and training"),
    ({"logprob_gap": 1e-3, "logprob_gap_judged": 2e-4}, "logprob_gap", "differs by 2.00e-04"),
    ({"logprob_gap": 0.1, "logprob_gap_judged": 1e-4}, None, ""),
    ({"critic_loss": math.inf}, "non_finite", "critic_loss is inf, not a finite number"),
    ({"kl_mean": math.nan, "ess": 0.1}, "non_finite", "kl_mean is nan"),
    ({"kl_mean": 10.0, "ratio_max": 4.0, "ess": 0.5, "logprob_gap": 1e-4, "lr": math.inf}, None, ""),
])  # fmt: skip
def test_what_breaks_a_rule(changed: dict[str, float], rule: str | None, says: str) -> None:
    breach = rules(**{"kl_mean": 10, "ratio_max": 4, "ess": 0.5}).check(SOUND | changed)
    assert (breach and breach.rule) == rule
    if breach is not None:
        assert says in breach.reason and REMEDIES[breach.rule] in breach.message


def test_without_limits_only_what_is_not_finite_breaks_a_rule() -> None:
    far = dict.fromkeys(FIGURES, 1e30) | {"ess": 1e-30}
    assert rules(gap=None).check(far) is None
    breach = rules(gap=None).check(far | {"actor_loss": math.nan})
    assert breach is not None and breach.figure == "actor_loss"
    agreed = [(held.agree_on_updates, held.undo_updates) for held in (rules(action=a) for a in ("stop", "skip", "rollback"))]
    assert agreed == [(False, False), (True, True), (True, False)]


@given(st.sampled_from(RULES), st.sampled_from(FIGURES), st.floats(), st.none() | st.floats(allow_nan=False))
def test_a_breach_survives_its_way_to_other_ranks(rule: str, figure: str, value: float, limit: float | None) -> None:
    breach = Breach(rule, figure, value, limit)
    code = breach.encode()
    assert len(code) == CODE_SIZE and str(decode(code)) == str(breach)
    assert first([None, breach, Breach("ess", "ess", 0.1, 0.2)]) is breach and first([None]) is None
