"""What of the critic's update is on the actor's path: spans of made-up steps, and a queue played by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.schedule.plan import scoring_delay
from oppo_megatron.train.logs.meter import StepClock

ROUNDS = [1.0, 3.0, 3.0, 3.0]  # prompts, two chunks while the actor decodes, the last chunk
ARRIVALS = [10.0, 20.0, 30.0]


@pytest.mark.parametrize(
    ("update_s", "delay_s"),
    [
        (0.0, 0.0),
        (6.0, 0.0),  # over before the first chunk
        (12.0, 0.0),  # the first chunk waits, but the second finds the scorers idle
        (23.0, 0.0),  # they catch up just when the last chunk comes
        (24.0, 1.0),
        (40.0, 17.0),  # they never stand idle: 40 + 10 of work, and without the update they end at 33
    ],
)
def test_a_delay_is_absorbed_by_idle_time_before_the_last_chunk(update_s: float, delay_s: float) -> None:
    assert scoring_delay(update_s, [update_s, *ROUNDS], ARRIVALS) == pytest.approx(delay_s)


def test_scorers_that_are_behind_anyway_pass_the_whole_delay_on() -> None:
    assert scoring_delay(5.0, [5.0, 20.0, 20.0, 20.0, 20.0], ARRIVALS) == pytest.approx(5.0)


def test_what_the_scorers_do_before_their_rounds_beside_the_update_counts_in_both() -> None:
    assert scoring_delay(6.0, [30.0, *ROUNDS], ARRIVALS) == pytest.approx(6.0)


@given(
    update_s=st.floats(0, 100),
    work=st.lists(st.floats(0, 50), min_size=1, max_size=6),
    waits=st.lists(st.floats(0, 50), max_size=5),
)
def test_a_delay_is_between_nothing_and_the_update(update_s: float, work: list[float], waits: list[float]) -> None:
    arrivals = [sum(waits[: n + 1]) for n in range(min(len(waits), len(work) - 1))]
    delay_s = scoring_delay(update_s, [work[0] + update_s, *work[1:]], arrivals)
    assert -1e-9 <= delay_s <= update_s + 1e-9


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_a_clock_tells_work_from_waits_for_chunks() -> None:
    hands = Hands()
    clock = StepClock(hands)
    clock.meet()
    hands.time += 4.0  # the critic's update
    clock.begin()
    hands.time += 6.0  # one second of work, five of waiting
    clock.round(5.0, decoded=True)
    hands.time += 3.0
    clock.round(5.5, decoded=True)
    hands.time += 2.0
    clock.round(5.5, decoded=False)
    assert clock.work == pytest.approx([4.0, 1.0, 2.5, 2.0])
    assert clock.ends == pytest.approx([10.0, 13.0])
    assert scoring_delay(4.0, clock.work, clock.ends) == 0.0, "they waited: the update is absorbed"
    clock.meet()
    hands.time += 1.0
    clock.begin()
    assert (clock.work, clock.ends) == ([1.0], []), "a step forgets the one before"
