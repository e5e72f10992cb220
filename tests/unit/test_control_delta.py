"""Delta controllers against hand-computed series, transcriptions of the paper and the laws of docs/algorithm.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.control.delta_controllers import BOUNDS, Bounds, DeltaController, MeasuredDelta, make_delta_controller
from oppo_megatron.errors import CheckpointError
from oppo_megatron.records import Decision, StepSignals

RuleName = Literal["eq4", "algorithm1", "eq4_literal", "measured", "fixed"]
MOST_DELTA = 40


def rewarded(reward: float) -> StepSignals:
    return StepSignals(reward, tail_waste=0.5, ess=1.0, length_gap=0.0)


def values(controller: DeltaController, rewards: list[float]) -> list[int]:
    return [controller.observe(step, rewarded(reward)).value for step, reward in enumerate(rewards)]


def mean(rewards: list[float]) -> Fraction:
    return sum((Fraction(r) for r in rewards), Fraction(0)) / len(rewards)


def eq4(rewards: list[float], window: int, delta: int) -> Iterator[int]:
    for t in range(1, len(rewards) + 1):
        if t >= 2 * window:
            rises = mean(rewards[t - window : t]) > mean(rewards[t - 2 * window : t - window])
            delta = min(MOST_DELTA, delta + 1) if rises else max(0, delta - 1)
        yield delta


def algorithm1(rewards: list[float], window: int, delta: int) -> Iterator[int]:
    reward_scores: list[float] = []
    for reward in rewards:
        reward_scores.append(reward)
        if len(reward_scores) >= 2 * window:
            d = mean(reward_scores[-window:]) - mean(reward_scores[-2 * window : -window])
            change = max(1, delta // 4)
            if d > 0:
                delta = max(0, delta - change)
            elif d < 0:
                delta = min(MOST_DELTA, delta + change)
            reward_scores = reward_scores[-window:]
        yield delta


def eq4_literal(rewards: list[float], window: int, delta: int) -> Iterator[int]:
    for t in range(len(rewards)):
        if t >= window:
            slope = sum(Fraction(rewards[i]) - Fraction(rewards[i - 1]) for i in range(t - window + 1, t + 1)) / window
            delta = min(MOST_DELTA, delta + 1) if slope > 0 else max(0, delta - 1)
        yield delta


# Rewards on a grid of exact binary fractions with many ties, so that the definitions need no tolerance.
@pytest.mark.parametrize("definition", [eq4, algorithm1, eq4_literal])
@given(st.lists(st.integers(-8, 8).map(lambda n: n / 4), max_size=40), st.integers(1, 5), st.integers(0, MOST_DELTA))
def test_a_rule_against_its_definition(definition: Callable, rewards: list[float], window: int, initial: int) -> None:
    config = DeltaConfig(rule=definition.__name__, initial=initial, max=MOST_DELTA, window=window)
    assert values(make_delta_controller(config), rewards) == list(definition(rewards, window, initial))


@given(block=st.lists(st.floats(-5, 5), min_size=2, max_size=6))
@example(block=[0.1, 0.2, 0.3])
@example(block=[0.3, 0.2, 0.1])
def test_rounding_does_not_make_a_slope(block: list[float]) -> None:
    controller = make_delta_controller(DeltaConfig(rule="eq4", initial=4, max=8, window=len(block)))
    assert values(controller, block + block[::-1])[-1] == 3


wastes = st.integers(0, 20).map(lambda n: n / 20)
ess, gaps = st.sampled_from([0.5, 0.79, 0.8, 0.9, 1.0]), st.sampled_from([-0.5, 0.0, 0.3, 0.4, 0.7])
steps_of_signals = st.lists(st.builds(StepSignals, st.floats(-10, 10), wastes, ess, gaps), max_size=40)
"""On grids that lie on, above and below the bounds, so that ties and breaches are common."""


@given(steps=steps_of_signals, rule=st.sampled_from(get_args(RuleName)), window=st.integers(1, 4))
def test_delta_stays_within_bounds_and_changed_tells_the_truth(steps: list[StepSignals], rule: RuleName, window: int) -> None:
    controller = make_delta_controller(DeltaConfig(rule=rule, initial=3, max=5, window=window))
    before = controller.value
    for step, signals in enumerate(steps):
        decision = controller.observe(step, signals)
        assert 0 <= decision.value <= 5 and (rule != "fixed" or decision.value == 3)
        assert decision.value == controller.value
        assert decision.changed == (decision.value != before)
        before = decision.value


@given(steps=steps_of_signals, split=st.integers(0, 40), rule=st.sampled_from(get_args(RuleName)), window=st.integers(1, 4))
def test_resume_continues_exactly(steps: list[StepSignals], split: int, rule: RuleName, window: int) -> None:
    config = DeltaConfig(rule=rule, initial=6, max=9, window=window)
    whole, first, second = (make_delta_controller(config) for _ in range(3))
    done = [first.observe(*step) for step in enumerate(steps[:split])]
    state = json.loads(json.dumps(first.state_dict()))
    assert all(len(state.get(name, [])) <= 2 * window for name in ("rewards", "steps"))
    second.load_state_dict(state)
    assert second.value == first.value
    rest = [second.observe(split + step, signals) for step, signals in enumerate(steps[split:])]
    assert done + rest == [whole.observe(*step) for step in enumerate(steps)]


def test_resume_under_another_rule_is_refused_and_reasons_name_the_figures() -> None:
    state = make_delta_controller(DeltaConfig(rule="eq4")).state_dict()
    with pytest.raises(CheckpointError, match=r"'eq4'.*'fixed'.*overlap\.delta\.rule=eq4"):
        make_delta_controller(DeltaConfig(rule="fixed")).load_state_dict(state)
    controller = make_delta_controller(DeltaConfig(rule="eq4", initial=4, max=8, window=1))
    waiting, grown = controller.observe(0, rewarded(0.25)), controller.observe(1, rewarded(0.75))
    assert waiting == Decision(4, "step 0: delta stays 4: 1 of 2 rewards that the rule needs", False)
    assert grown.changed and all(figure in grown.reason for figure in ("step 1", "0.75", "0.25", "+0.5", "4 +1 -> 5"))
    with pytest.raises(AssertionError, match="step 3: mean reward nan"):
        make_delta_controller(DeltaConfig()).observe(3, rewarded(float("nan")))


@pytest.mark.parametrize("rule", ["eq4", "algorithm1", "eq4_literal"])
@pytest.mark.parametrize("level", [0.7, -300.0])
def test_rewards_that_rounding_parts_are_equal(rule: RuleName, level: float) -> None:
    """Another processor or layout gives rewards that are apart by a rounding of float32, and delta must be the same."""
    config = DeltaConfig(rule=rule, initial=8, max=20, window=2)
    flat, rounded = [level] * 12, [level * (1 + (-1) ** (step // 2) * 1e-7) for step in range(12)]
    assert values(make_delta_controller(config), rounded) == values(make_delta_controller(config), flat)


CALM = StepSignals(reward_mean=0.0, tail_waste=0.35, ess=1.0, length_gap=0.0)
EMPTY, FULL = replace(CALM, tail_waste=0.6), replace(CALM, tail_waste=0.1)
STALE, SHORT = replace(EMPTY, ess=0.79), replace(EMPTY, length_gap=0.41)
Plant = list[StepSignals]
"""Constant signals of each delta."""


def new(window: int = 2, initial: int = 4, bounds: Bounds = BOUNDS) -> DeltaController:
    return MeasuredDelta(DeltaConfig(rule="measured", window=window, initial=initial, max=8), bounds)


def moved(controller: DeltaController, steps: list[StepSignals]) -> list[int]:
    return [controller.observe(step, signals).value for step, signals in enumerate(steps)]


FAR, NARROW = replace(EMPTY, length_gap=1.0), Bounds(target_waste=0.5, dead_band=0.125)


@pytest.mark.parametrize(
    ("controller", "steps", "expected"),
    [
        (new(), [EMPTY] * 7, [4, 5, 5, 6, 6, 7, 7]),  # grows once a window
        (new(initial=2), [FULL] * 6, [2, 1, 1, 0, 0, 0]),  # shrinks once a window
        *((new(bounds=NARROW), [replace(CALM, tail_waste=x)] * 6, [4] * 6) for x in (0.375, 0.5, 0.625)),  # borders included
        # windows do not overlap: a low and a high step have the mean 0.35, and two high ones only meet across their border
        (new(), [FULL, EMPTY, EMPTY, FULL] * 2, [4] * 8),
        *((new(window=5), [broken] * 3, [3, 2, 1]) for broken in (STALE, SHORT)),  # a broken bound shrinks at once
        (new(window=3), [EMPTY, STALE, EMPTY] + [EMPTY] * 3, [4, 3, 3, 3, 3, 4]),  # and forbids growth in its window
        # the gap's means over the last 4 are 0, 0, 0, 0.25, 0.5 (broken), 0.5 (broken), 0.5 (broken), 0.25
        (new(window=4), [EMPTY] * 3 + [FAR] * 2 + [EMPTY] * 3, [4, 4, 4, 5, 4, 3, 2, 2]),
        (new(window=1), [EMPTY, STALE, STALE, STALE] + [EMPTY] * 4, [5, 4, 3, 2, 3, 4, 4, 4]),  # below a ceiling it moves
        (new(window=1), [EMPTY, CALM, STALE, EMPTY, EMPTY], [5, 5, 4, 5, 6]),  # a growth that stood its window sets none
    ],
)
def test_delta_moves_by_waste_and_bias(controller: DeltaController, steps: list[StepSignals], expected: list[int]) -> None:
    assert moved(controller, steps) == expected


def test_a_growth_taken_back_is_tried_again_only_when_its_signal_is_better() -> None:
    controller = new(window=1)
    assert moved(controller, [EMPTY, STALE]) == [5, 4]
    stale = replace(EMPTY, ess=0.85)  # what delta 4 gives, measured now
    assert moved(controller, [stale] * 4) == [4] * 4
    # More waste is no reason: ess forbade it.  Ess 0.05 better is within the band, 0.06 is not.
    assert moved(controller, [replace(stale, tail_waste=0.9), replace(stale, ess=0.9)]) == [4, 4]
    assert moved(controller, [replace(stale, ess=0.91)]) == [5]
    # Better is against the worst window.
    for signal, broken, levels in ("ess", STALE, [0.9, 0.85, 0.901]), ("length_gap", SHORT, [0.25, 0.3, 0.249]):
        steps = [EMPTY, broken, *(replace(EMPTY, **{signal: level}) for level in levels)]
        assert moved(new(window=1), steps) == [5, 4, 4, 4, 5]
    # A ceiling is lifted by nothing that was measured at another delta.
    controller = new(window=1)
    assert moved(controller, [EMPTY, FULL, EMPTY]) == [5, 4, 4]  # 4 has a waste of 0.6, and 5 too little
    assert moved(controller, [STALE, replace(EMPTY, tail_waste=0.9), EMPTY]) == [3, 4, 4]
    assert moved(controller, [replace(EMPTY, tail_waste=0.66)]) == [5]


ABOVE = "tail waste 0.600 over 2 steps is above 0.4"
UNBIASED = "ess 1.000 and length gap +0.000 are within bounds"


@pytest.mark.parametrize(("steps", "expected"), [
    ([EMPTY], "step 0: 1 of 2 steps that the rule averages: delta stays 4"),
    ([EMPTY, EMPTY], f"step 1: {ABOVE}, {UNBIASED}: delta 4 +1 -> 5 (within 0..8)"),
    ([FULL, FULL], "step 1: tail waste 0.100 over 2 steps is below 0.3: delta 4 -1 -> 3 (within 0..8)"),
    ([CALM, CALM], f"step 1: tail waste 0.350 over 2 steps is within 0.3..0.4, {UNBIASED}: delta stays 4"),
    ([STALE], "step 0: ess 0.790 is below its floor of 0.8: delta 4 -1 -> 3 (within 0..8)"),
    ([CALM, FAR], "step 1: length gap +0.500 over 2 steps is above its cap of 0.4: delta 4 -1 -> 3 (within 0..8)"),
    ([STALE, EMPTY], f"step 1: {ABOVE}, but a step of them broke a bound: delta stays 3"),
    ([EMPTY, EMPTY, STALE, EMPTY, EMPTY, EMPTY],
        f"step 5: {ABOVE}, {UNBIASED}, 5 was taken back for its ess: delta 4 +1 -> 4 (within 0..8)"),
])  # fmt: skip
def test_reasons_of_the_measured_rule(steps: list[StepSignals], expected: str) -> None:
    controller = new()
    assert [controller.observe(*step) for step in enumerate(steps)][-1].reason == expected


MOST = 8
share = st.integers(0, 40).map(lambda n: n / 40)
any_row = st.builds(StepSignals, st.just(0.0), share, share, st.integers(-40, 40).map(lambda n: n / 40))


@st.composite
def monotone_plants(draw: st.DrawFn) -> Plant:
    waste, ess, gap = (sorted(draw(st.lists(share, min_size=MOST + 1, max_size=MOST + 1))) for _ in range(3))
    return [StepSignals(0.0, *row) for row in zip(waste[::-1], ess[::-1], gap, strict=True)]


class Rule(NamedTuple):
    config: DeltaConfig
    bounds: Bounds

    def controller(self) -> MeasuredDelta:
        return MeasuredDelta(self.config, self.bounds)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    initial, high = sorted(draw(st.lists(st.integers(0, MOST), min_size=2, max_size=2)))
    config = DeltaConfig(rule="measured", initial=initial, max=high, window=draw(st.integers(1, 4)))
    wastes, bands, floors, caps = ([0.1, 0.35, 0.6], [0.0, 0.05, 0.2], [0.0, 0.4, 0.8], [0.1, 0.4, 1.0])
    return Rule(config, Bounds(*(draw(st.sampled_from(values)) for values in (wastes, bands, floors, caps))))


def settle(rule: Rule, plant: Plant) -> int:
    """Delta at rest: after the most moves that law 5 allows it stays for as long again."""
    controller, span = rule.controller(), rule.config.max + 1
    enough = (span + 1) * (span + span * rule.config.window) + 2 * rule.config.window
    for step in range(enough):
        controller.observe(step, plant[controller.value])
    rest = controller.value
    assert [controller.observe(step, plant[controller.value]).value for step in range(enough)] == [rest] * enough
    return rest


@given(rule=rules(), plant=st.lists(any_row, min_size=MOST + 1, max_size=MOST + 1))
def test_delta_comes_to_rest_on_any_plant(rule: Rule, plant: Plant) -> None:
    assert 0 <= settle(rule, plant) <= rule.config.max


def verdict(rule: Rule, signals: StepSignals) -> int:
    if signals.ess < rule.bounds.ess_floor or signals.length_gap > rule.bounds.length_gap_cap:
        return -1
    if signals.tail_waste < rule.bounds.target_waste - rule.bounds.dead_band:
        return -1
    return 1 if signals.tail_waste > rule.bounds.target_waste + rule.bounds.dead_band else 0


@given(rule=rules(), plant=monotone_plants())
def test_on_a_monotone_plant_delta_rests_where_it_should(rule: Rule, plant: Plant) -> None:
    """Rests in the dead band, else at the last delta below which all grow, else at an end of the range."""
    rest = settle(rule, plant)
    here = verdict(rule, plant[rest])
    if here == 1:
        assert rest == rule.config.max or verdict(rule, plant[rest + 1]) == -1
    elif here == -1:
        assert rest == 0


signals = st.builds(StepSignals, st.just(0.0), share, share, share)
steps = st.lists(signals, max_size=30)


def clone(controller: DeltaController, rule: Rule) -> DeltaController:
    twin = rule.controller()
    twin.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    return twin


@given(rule=rules(), history=steps, last=signals, other=share)
def test_of_two_steps_in_one_state_more_waste_or_less_bias_never_gives_the_smaller_delta(
    rule: Rule, history: list[StepSignals], last: StepSignals, other: float
) -> None:
    controller = rule.controller()
    moved(controller, history)
    for field, sign in (("tail_waste", 1), ("ess", 1), ("length_gap", -1)):
        changed = replace(last, **{field: other})
        decisions: list[Decision] = [clone(controller, rule).observe(99, signals) for signals in (last, changed)]
        first, second = (decision.value for decision in decisions)
        ahead = sign * (other - getattr(last, field))
        assert first <= second if ahead >= 0 else first >= second


@given(rule=rules(), history=steps, shifts=st.lists(st.tuples(share, share, share), min_size=30, max_size=30))
def test_over_whole_histories_too_while_no_growth_was_taken_back(
    rule: Rule, history: list[StepSignals], shifts: list[tuple[float, float, float]]
) -> None:
    small, large = rule.controller(), rule.controller()
    for step, (signals, (waste, ess, gap)) in enumerate(zip(history, shifts, strict=False)):
        more = StepSignals(0.0, signals.tail_waste + waste, signals.ess + ess, signals.length_gap - gap)
        less, greater = small.observe(step, signals).value, large.observe(step, more).value
        if small.state_dict()["ceiling"] or large.state_dict()["ceiling"]:
            break
        assert less <= greater
