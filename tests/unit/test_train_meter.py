"""The critic's update on the actor's path, as a queue played by hand, and the costs of actions by stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.rundir.trace import SpanRecorder
from oppo_megatron.schedule.actions import Action, Op, Payload
from oppo_megatron.schedule.plan import scoring_delay
from oppo_megatron.schedule.rounds import Site
from oppo_megatron.schedule.weaving.costs import CostMeter, Costs, Linear
from oppo_megatron.train.logs.meter import RoundTracer, StepClock

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


PLACES = {
    "actor": RolePlacement((0, 1, 2, 3), pp=4),
    "critic": RolePlacement((2, 3), pp=2),
    "reward": RolePlacement((0, 1, 2, 3), tp=2, pp=2),
}
STAGES = {"actor": 4, "critic": 2, "reward": 2}


def test_each_rank_feeds_its_stage_of_each_role() -> None:
    """Rank r takes r + 1 seconds for everything; the vectors of all ranks together give each stage its ranks' seconds."""
    vectors = []
    for rank in range(4):
        tracer = RoundTracer(SpanRecorder(rank), CostMeter(STAGES), Site(PLACES), actions=False, schedules=None)
        for role, placement in PLACES.items():
            op = Op.DECODE if role == "actor" else Op.PREFILL
            for n in (1, 2, 3, 4) if rank in placement.ranks else ():
                tracer(Action(rank, op, role, 0, 1, 0), 10.0, 11.0 + rank, n)
        tracer(Action(rank, Op.SEND, "actor", 0, 1, 0, Payload.HIDDEN, 0), 10.0, 90.0, 0)
        vectors.append(tracer.meter.to_vector())
    costs = CostMeter(STAGES, [sum(column) for column in zip(*vectors, strict=True)]).costs(Costs())
    assert costs.decode == tuple(Linear(float(rank + 1), 0.0) for rank in range(4))
    assert costs.prefill["critic"] == (Linear(3.0, 0.0), Linear(4.0, 0.0))
    assert costs.prefill["reward"] == (Linear(1.5, 0.0), Linear(3.5, 0.0))
