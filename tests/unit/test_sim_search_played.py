"""Plans of overlapped rounds: what a step has to do once rollouts are carried, and how plans are played against each other."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import pytest

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.sim.pricing.decoding import Decoding
from oppo_megatron.sim.search import finalists
from oppo_megatron.sim.search.exact import never
from oppo_megatron.sim.search.finalists import finished, played
from oppo_megatron.sim.search.planning import Planned, Task, make_plan
from oppo_megatron.sim.search.record import to_record
from oppo_megatron.sim.search.steady import steady_work
from tests.unit.test_sim_search_plan import CLUSTER, config

LENGTHS = [4 * i + 1 for i in range(32)]
PLAIN = Decoding(256, LENGTHS)


def dealt(seq_id: int) -> int:
    return LENGTHS[seq_id * 13 % 32]


def carrying(delta: int, **changes: object) -> TrainConfig:
    overlap = {"delta": {"rule": "fixed", "initial": delta, "max": 32}, "chunk": {"tokens": 16, "adaptive": False}}
    return config(overlap=overlap | changes)


def test_without_delta_a_step_decodes_its_batch() -> None:
    """Each of these batches has every length once."""
    assert steady_work(config(overlap={"inter": False}), PLAIN, dealt).decoding == PLAIN
    found = steady_work(carrying(0), PLAIN, dealt)
    assert sorted(found.decoding.lengths) == LENGTHS and found.decoding.prompt_tokens == 256
    assert found.reads["actor"] == pytest.approx(1.0, abs=0.005) and found.reads["reward"] == pytest.approx(
        1.0, rel=0.02
    )


@pytest.mark.parametrize("delta", [4, 16])
def test_carried_rollouts_fill_up_the_batch_and_are_read_again(delta: int) -> None:
    """In the long run as many tokens are decoded as trained, over more sequences in fewer steps."""
    found = steady_work(carrying(delta), PLAIN, dealt)
    assert sum(found.decoding.lengths) == pytest.approx(sum(LENGTHS), rel=0.06)
    assert len(found.decoding.lengths) > 32 and max(found.decoding.lengths) < max(LENGTHS)
    assert found.decoding.prompt_tokens > 256 and found.reads["actor"] > 1.05
    kept = steady_work(carrying(delta, actor_kv="keep"), PLAIN, dealt)
    assert kept.reads["actor"] == pytest.approx(1.0, abs=0.02) and kept.decoding == found.decoding


@cache
def planned() -> Planned:
    return make_plan(Task(carrying(0), CLUSTER, LENGTHS), "exact", 1, 1, never, never)


def test_plans_are_played_until_no_other_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap that is told is of played seconds; whatever was not played lies above it by price."""
    few = {"RESPONSES": (32, 64), "FEW": 1, "MANY": 2, "WARM_UP": 1, "LONG": 2, "LONG_RESPONSES": 64, "MORE": 1}
    for name, value in few.items():
        monkeypatch.setattr(finalists, name, value)
    before = planned()
    after = finished(before, 1, never)
    contest = after.contest
    assert contest is not None and contest.ended and contest.finalists == 2 <= contest.plans < len(before.plans)
    assert [each.played for each in after.plans] == [number < contest.plans for number in range(len(after.plans))]
    first, rest = after.plans[0].step_ns, min(each.plan.step_ns for each in after.plans[contest.plans :])
    assert first <= after.plans[1].step_ns
    assert rest * min(1.0, contest.least_ratio) > min(each.step_ns for each in after.plans[: contest.plans]) * 0.98
    record = to_record(after, "exact", 1, 1.0)["contest"]
    assert record["gap"] == first / min(each.plan.step_ns for each in after.plans) - 1
    assert record["others_s"] == rest / 1e9


def test_where_time_is_out_the_plans_asked_for_and_one_more_are_played() -> None:
    after = finished(planned(), 1, lambda: True)
    assert after.contest is not None and (after.contest.plans, after.contest.finalists, after.contest.ended) == (
        2,
        0,
        False,
    )
    assert after.plans[0].played and after.plans[1].played and not after.plans[2].played


def test_the_delta_of_least_seconds_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against every delta played on its own for long: the chosen one trains a token in no more time than any."""
    task, plan = planned().task, planned().plans[0]
    monkeypatch.setattr(finalists, "MOST_LONG", 16)
    chosen = finalists.best_delta(task, plan, 4, never)
    paces = {
        delta: finalists.pace(finalists.counted_steps(task, finalists.with_delta(plan.config, delta), 16))
        for delta in (0, 8, 32)
    }
    best = min(paces.values())
    assert paces[chosen or 0] <= 1.015 * best and (chosen is not None) == (paces[0] > 1.015 * best)


def test_played_seconds_are_means_of_steps_after_the_first_responses() -> None:
    task, plan = planned().task, planned().plans[0]
    steps = finalists.counted_steps(task, plan.config, 3)
    assert len(steps) == 3 and steps[0].step > 3 and steps[0].clock > max(LENGTHS)
    assert played(task, plan, 3).step_ns == pytest.approx(1e9 * fmean(step.step_s for step in steps), rel=1e-6)
