"""The laws of the `measured` rule, as docs/algorithm.md states them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.control.delta_controllers import BOUNDS, Bounds, DeltaController, MeasuredDelta, make_delta_controller
from oppo_megatron.records import Decision, StepSignals

CALM = StepSignals(reward_mean=0.0, tail_waste=0.35, ess=1.0, length_gap=0.0)
EMPTY, FULL = replace(CALM, tail_waste=0.6), replace(CALM, tail_waste=0.1)
STALE, SHORT = replace(EMPTY, ess=0.79), replace(EMPTY, length_gap=0.41)
Plant = list[StepSignals]
"""Constant signals of each delta."""


def new(window: int = 2, initial: int = 4, bounds: Bounds = BOUNDS) -> DeltaController:
    return MeasuredDelta(DeltaConfig(rule="measured", window=window, initial=initial, max=8), bounds)


def run(controller: DeltaController, steps: list[StepSignals]) -> list[int]:
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
    assert run(controller, steps) == expected


def test_a_growth_taken_back_is_tried_again_only_when_its_signal_is_better() -> None:
    controller = new(window=1)
    assert run(controller, [EMPTY, STALE]) == [5, 4]
    stale = replace(EMPTY, ess=0.85)  # what delta 4 gives, measured now
    assert run(controller, [stale] * 4) == [4] * 4
    # More waste is no reason: ess forbade it.  Ess 0.05 better is within the band, 0.06 is not.
    assert run(controller, [replace(stale, tail_waste=0.9), replace(stale, ess=0.9)]) == [4, 4]
    assert run(controller, [replace(stale, ess=0.91)]) == [5]


@pytest.mark.parametrize(("signal", "levels"), [("ess", [0.9, 0.85, 0.901]), ("length_gap", [0.25, 0.3, 0.249])])
def test_better_is_against_the_worst_window(signal: str, levels: list[float]) -> None:
    controller = new(window=1)
    assert run(controller, [EMPTY, STALE if signal == "ess" else SHORT]) == [5, 4]
    assert run(controller, [replace(EMPTY, **{signal: level}) for level in levels]) == [4, 4, 5]


def test_what_was_measured_at_another_delta_lifts_no_ceiling() -> None:
    controller = new(window=1)
    assert run(controller, [EMPTY, FULL, EMPTY]) == [5, 4, 4]  # 4 has a waste of 0.6, and 5 too little
    assert run(controller, [STALE, replace(EMPTY, tail_waste=0.9), EMPTY]) == [3, 4, 4]
    assert run(controller, [replace(EMPTY, tail_waste=0.66)]) == [5]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([EMPTY], "step 0: 1 of 2 steps that the rule averages: delta stays 4"),
        (
            [EMPTY, EMPTY],
            "step 1: tail waste 0.600 over 2 steps is above 0.4, ess 1.000 and length gap +0.000 are within bounds: "
            "delta 4 +1 -> 5 (within 0..8)",
        ),
        ([FULL, FULL], "step 1: tail waste 0.100 over 2 steps is below 0.3: delta 4 -1 -> 3 (within 0..8)"),
        (
            [CALM, CALM],
            "step 1: tail waste 0.350 over 2 steps is within 0.3..0.4, ess 1.000 and length gap +0.000 are within "
            "bounds: delta stays 4",
        ),
        ([STALE], "step 0: ess 0.790 is below its floor of 0.8: delta 4 -1 -> 3 (within 0..8)"),
        (
            [CALM, replace(CALM, length_gap=0.9)],
            "step 1: length gap +0.450 over 2 steps is above its cap of 0.4: delta 4 -1 -> 3 (within 0..8)",
        ),
        ([STALE, EMPTY], "step 1: tail waste 0.600 over 2 steps is above 0.4, but a step of them broke a bound: delta stays 3"),
        (
            [EMPTY, EMPTY, STALE, EMPTY, EMPTY, EMPTY],
            "step 5: tail waste 0.600 over 2 steps is above 0.4, ess 1.000 and length gap +0.000 are within bounds, 5 was "
            "taken back for its ess: delta 4 +1 -> 4 (within 0..8)",
        ),
    ],
)
def test_reasons_name_the_figures(steps: list[StepSignals], expected: str) -> None:
    controller = new()
    assert [controller.observe(*step) for step in enumerate(steps)][-1].reason == expected


MOST = 8
share = st.integers(0, 40).map(lambda n: n / 40)
any_row = st.builds(StepSignals, st.just(0.0), share, share, st.integers(-40, 40).map(lambda n: n / 40))
any_plant = st.lists(any_row, min_size=MOST + 1, max_size=MOST + 1)


@st.composite
def monotone_plants(draw: st.DrawFn) -> Plant:
    """Less waste, less ess and a larger gap with every delta more."""
    waste, ess, gap = (sorted(draw(st.lists(share, min_size=MOST + 1, max_size=MOST + 1))) for _ in range(3))
    return [StepSignals(0.0, *row) for row in zip(waste[::-1], ess[::-1], gap, strict=True)]


@dataclass(frozen=True)
class Rule:
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


@given(rule=rules(), plant=any_plant)
def test_delta_comes_to_rest_on_any_plant(rule: Rule, plant: Plant) -> None:
    assert 0 <= settle(rule, plant) <= rule.config.max


def verdict(rule: Rule, signals: StepSignals) -> int:
    """The delta that these signals call for, for ever."""
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


@pytest.mark.parametrize(
    ("window", "ess", "expected"),
    [(1, [1.0, 0.79, 0.85, 0.85, 0.91], [5, 4, 4, 4, 5]), (3, [1.0, 0.79, 1.0, 1.0, 1.0, 1.0], [4, 3, 3, 3, 3, 4])],
)
def test_resumed_after_every_step_all_is_remembered(window: int, ess: list[float], expected: list[int]) -> None:
    config = DeltaConfig(rule="measured", initial=4, window=window)
    controller, values = make_delta_controller(config), []
    for step, value in enumerate(ess):
        values.append(controller.observe(step, replace(EMPTY, ess=value)).value)
        controller = clone(controller, Rule(config, BOUNDS))
    assert values == expected


def clone(controller: DeltaController, rule: Rule) -> DeltaController:
    twin = rule.controller()
    twin.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    return twin


@given(rule=rules(), history=steps, last=signals, other=share)
def test_of_two_steps_in_one_state_more_waste_or_less_bias_never_gives_the_smaller_delta(
    rule: Rule, history: list[StepSignals], last: StepSignals, other: float
) -> None:
    controller = rule.controller()
    run(controller, history)
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
