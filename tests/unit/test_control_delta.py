"""Delta controllers against hand-computed series and plain transcriptions of the paper."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.control.delta_controllers import DeltaController, make_delta_controller
from oppo_megatron.errors import CheckpointError
from oppo_megatron.records import Decision, StepSignals

Rule = Literal["eq4", "algorithm1", "eq4_literal", "measured", "fixed"]
RULES: list[Rule] = ["eq4", "algorithm1", "eq4_literal", "measured", "fixed"]

# Rewards on a grid of exact binary fractions with many ties, so that the references need no tolerance.
rewards_strategy = st.lists(st.integers(-8, 8).map(lambda n: n / 4), max_size=40)


def rewarded(reward: float) -> StepSignals:
    return StepSignals(reward, tail_waste=0.5, ess=1.0, length_gap=0.0)


def values(controller: DeltaController, rewards: list[float]) -> list[int]:
    return [controller.observe(step, rewarded(reward)).value for step, reward in enumerate(rewards)]


def mean(rewards: list[float]) -> Fraction:
    return sum((Fraction(r) for r in rewards), Fraction(0)) / len(rewards)


def test_fixed_ignores_the_reward() -> None:
    assert values(make_delta_controller(DeltaConfig(rule="fixed", initial=0)), [0.0, 9.0, -9.0]) == [0, 0, 0]


@given(rewards=rewards_strategy, window=st.integers(1, 5), initial=st.integers(0, 12))
def test_eq4_against_its_definition(rewards: list[float], window: int, initial: int) -> None:
    config = DeltaConfig(rule="eq4", initial=initial, max=12, window=window)
    expected, delta = [], initial
    for t in range(1, len(rewards) + 1):
        if t >= 2 * window:
            rises = mean(rewards[t - window : t]) > mean(rewards[t - 2 * window : t - window])
            delta = min(12, delta + 1) if rises else max(0, delta - 1)
        expected.append(delta)
    assert values(make_delta_controller(config), rewards) == expected


@given(rewards=rewards_strategy, window=st.integers(1, 5), initial=st.integers(0, 40))
def test_algorithm1_against_a_transcription(rewards: list[float], window: int, initial: int) -> None:
    config = DeltaConfig(rule="algorithm1", initial=initial, max=40, window=window)
    expected, delta, reward_scores = [], initial, []
    for reward in rewards:
        reward_scores.append(reward)
        if len(reward_scores) >= 2 * window:
            d = mean(reward_scores[-window:]) - mean(reward_scores[-2 * window : -window])
            change = max(1, delta // 4)
            if d > 0:
                delta = max(0, delta - change)
            elif d < 0:
                delta = min(40, delta + change)
            reward_scores = reward_scores[-window:]
        expected.append(delta)
    assert values(make_delta_controller(config), rewards) == expected


@given(rewards=rewards_strategy, window=st.integers(1, 5))
def test_eq4_literal_is_the_mean_of_differences(rewards: list[float], window: int) -> None:
    config = DeltaConfig(rule="eq4_literal", initial=3, max=7, window=window)
    expected, delta = [], 3
    for t in range(len(rewards)):
        if t >= window:
            slope = sum(Fraction(rewards[i]) - Fraction(rewards[i - 1]) for i in range(t - window + 1, t + 1)) / window
            delta = min(7, delta + 1) if slope > 0 else max(0, delta - 1)
        expected.append(delta)
    assert values(make_delta_controller(config), rewards) == expected


@given(block=st.lists(st.floats(-5, 5), min_size=2, max_size=6))
@example(block=[0.1, 0.2, 0.3])
@example(block=[0.3, 0.2, 0.1])
def test_rounding_does_not_make_a_slope(block: list[float]) -> None:
    """The same rewards in another order have the same mean: eq. 4 must not grow delta on them."""
    controller = make_delta_controller(DeltaConfig(rule="eq4", initial=4, max=8, window=len(block)))
    assert values(controller, block + block[::-1])[-1] == 3


wastes = st.integers(0, 20).map(lambda n: n / 20)
ess, gaps = st.sampled_from([0.5, 0.79, 0.8, 0.9, 1.0]), st.sampled_from([-0.5, 0.0, 0.3, 0.4, 0.7])
steps_of_signals = st.lists(st.builds(StepSignals, st.floats(-10, 10), wastes, ess, gaps), max_size=40)
"""On grids that lie on, above and below the bounds, so that ties and breaches are common."""


@given(steps=steps_of_signals, rule=st.sampled_from(RULES), window=st.integers(1, 4))
def test_delta_stays_within_bounds_and_changed_tells_the_truth(steps: list[StepSignals], rule: Rule, window: int) -> None:
    controller = make_delta_controller(DeltaConfig(rule=rule, initial=3, max=5, window=window))
    before = controller.value
    for step, signals in enumerate(steps):
        decision = controller.observe(step, signals)
        assert 0 <= decision.value <= 5
        assert decision.value == controller.value
        assert decision.changed == (decision.value != before)
        before = decision.value


@given(steps=steps_of_signals, split=st.integers(0, 40), rule=st.sampled_from(RULES), window=st.integers(1, 4))
def test_resume_continues_exactly(steps: list[StepSignals], split: int, rule: Rule, window: int) -> None:
    config = DeltaConfig(rule=rule, initial=6, max=9, window=window)
    whole, first, second = (make_delta_controller(config) for _ in range(3))
    done = [first.observe(*step) for step in enumerate(steps[:split])]
    state = json.loads(json.dumps(first.state_dict()))
    assert all(len(state.get(name, [])) <= 2 * window for name in ("rewards", "steps"))
    second.load_state_dict(state)
    assert second.value == first.value
    rest = [second.observe(split + step, signals) for step, signals in enumerate(steps[split:])]
    assert done + rest == [whole.observe(*step) for step in enumerate(steps)]


def test_resume_under_another_rule_is_refused() -> None:
    state = make_delta_controller(DeltaConfig(rule="eq4")).state_dict()
    with pytest.raises(CheckpointError, match=r"'eq4'.*'fixed'.*overlap\.delta\.rule=eq4"):
        make_delta_controller(DeltaConfig(rule="fixed")).load_state_dict(state)


def test_reasons_name_the_figures() -> None:
    controller = make_delta_controller(DeltaConfig(rule="eq4", initial=4, max=8, window=1))
    waiting, grown = controller.observe(0, rewarded(0.25)), controller.observe(1, rewarded(0.75))
    assert waiting == Decision(4, "step 0: delta stays 4: 1 of 2 rewards that the rule needs", False)
    assert grown.changed
    for figure in ("step 1", "0.75", "0.25", "+0.5", "4 +1 -> 5"):
        assert figure in grown.reason


def test_a_reward_that_is_not_finite_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="step 3: mean reward nan"):
        make_delta_controller(DeltaConfig()).observe(3, rewarded(float("nan")))


@pytest.mark.parametrize("rule", ["eq4", "algorithm1", "eq4_literal"])
@pytest.mark.parametrize("level", [0.7, -300.0])
def test_rewards_that_rounding_parts_are_equal(rule: Rule, level: float) -> None:
    """Another processor or layout gives rewards that are apart by a rounding of float32, and delta must be the same."""
    config = DeltaConfig(rule=rule, initial=8, max=20, window=2)
    flat, rounded = [level] * 12, [level * (1 + (-1) ** (step // 2) * 1e-7) for step in range(12)]
    assert values(make_delta_controller(config), rounded) == values(make_delta_controller(config), flat)
