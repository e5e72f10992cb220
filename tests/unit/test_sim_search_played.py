"""Plans of overlapped rounds: the work of a step when rollouts are carried, and how plans are played."""

from __future__ import annotations

from functools import cache
from statistics import fmean

import pytest

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.sim.pricing.decoding import Decoding
from oppo_megatron.sim.search import playing
from oppo_megatron.sim.search.configured import planned_config
from oppo_megatron.sim.search.enumeration import Plan
from oppo_megatron.sim.search.planning import Task, find_plans
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
    assert found.reads["actor"] == pytest.approx(1.0, abs=0.005) and found.reads["reward"] == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("delta", [4, 16])
def test_carried_rollouts_fill_up_the_batch_and_are_read_again(delta: int) -> None:
    """In the long run as many tokens are decoded as trained, over more sequences in fewer steps."""
    found = steady_work(carrying(delta), PLAIN, dealt)
    assert sum(found.decoding.lengths) == pytest.approx(sum(LENGTHS), rel=0.06)
    assert len(found.decoding.lengths) > 32 and max(found.decoding.lengths) < max(LENGTHS)
    assert found.decoding.prompt_tokens > 256 and found.reads["actor"] > 1.05
    kept = steady_work(carrying(delta, actor_kv="keep"), PLAIN, dealt)
    assert kept.reads["actor"] == pytest.approx(1.0, abs=0.02) and kept.decoding == found.decoding


TASK = Task(carrying(0), CLUSTER, LENGTHS)


@cache
def planned() -> list[Plan]:
    return find_plans(TASK)[0]


def test_plans_are_played_until_no_other_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the least ratio of played seconds to a price, no plan that is left out can be the fastest."""
    few = {"RESPONSES": (32, 64), "FEW": 1, "MANY": 2, "WARM_UP": 1, "LONG": 2, "LONG_RESPONSES": 64}
    for name, value in few.items():
        monkeypatch.setattr(playing, name, value)
    seen, real = list[tuple[Plan, float]](), playing.play_plan

    def watched(task: Task, plan: Plan, config: TrainConfig, steps: int) -> playing.Played:
        found = real(task, plan, config, steps)
        seen.append((plan, found.step_s))
        return found

    monkeypatch.setattr(playing, "play_plan", watched)
    best = playing.play_plans(TASK, planned(), 1)
    count = len({id(plan) for plan, _ in seen})
    assert 1 < count < len(planned()) and len(best) == 1
    first = seen[:count]
    ratio = min(1.0, *(seconds * 1e9 / plan.step_ns for plan, seconds in first))
    assert planned()[count].step_ns * ratio > 1e9 * min(seconds for _, seconds in first)


def test_the_delta_of_least_seconds_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen delta trains a token in no more time than any other that is played for long."""
    monkeypatch.setattr(playing, "MOST_LONG", 16)
    config = planned_config(TASK.config, planned()[0])
    chosen = playing.best_delta(TASK, config, 4)
    paces = {
        delta: playing.pace(playing.counted_steps(TASK, config.with_values({playing.DELTA: delta}), 16)) for delta in (0, 8, 32)
    }
    best = min(paces.values())
    assert paces[chosen or 0] <= 1.015 * best and (chosen is not None) == (paces[0] > 1.015 * best)


def test_played_seconds_are_means_of_steps_after_the_first_responses() -> None:
    config = planned_config(TASK.config, planned()[0])
    steps = playing.counted_steps(TASK, config, 3)
    assert len(steps) == 3 and steps[0].step > 3 and steps[0].clock > max(LENGTHS)
    seconds = playing.play_plan(TASK, planned()[0], config, 3).step_s
    assert seconds == pytest.approx(fmean(step.step_s for step in steps), rel=1e-6)
