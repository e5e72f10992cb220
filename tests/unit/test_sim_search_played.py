"""Plans of overlapped rounds: what a step has to do once rollouts are carried, and how plans are played against each other."""

from __future__ import annotations

from dataclasses import replace
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


def planned(delta: int = 0) -> Planned:
    return make_plan(Task(carrying(delta), CLUSTER, LENGTHS), "exact", 1, 1, never, never)


def test_all_plans_that_were_kept_are_played_and_the_gap_is_of_the_played_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finalists, "RESPONSES", (96, 160))
    monkeypatch.setattr(finalists, "FEW", 1)
    monkeypatch.setattr(finalists, "MANY", 2)
    before = planned()
    before = replace(before, plans=before.plans[:7])
    after = finished(before, 1, never)
    assert after.contest is not None and (after.contest.plans, after.contest.finalists) == (7, 4)
    assert all(each.played for each in after.plans)
    first = after.plans[0].step_ns
    assert first == min(each.step_ns for each in after.plans[:4])
    record = to_record(after, "exact", 1, 1.0)["contest"]
    assert record["gap"] == first / min(each.plan.step_ns for each in after.plans) - 1
    assert record["others_s"] is None or record["others_s"] >= record["least_s"]


def test_the_delta_of_least_seconds_is_taken() -> None:
    """Against every delta played on its own for long: the chosen one trains a token in no more time than any."""
    task = Task(carrying(0), CLUSTER, LENGTHS)
    plan = make_plan(task, "exact", 1, 1, never, never).plans[0]
    chosen = finalists._best_delta(task, plan, 4)
    paces = {
        delta: finalists._pace(finalists._counted(task, finalists.with_delta(plan.config, delta), 24))
        for delta in (0, 8, 32)
    }
    best = min(paces.values())
    assert paces[chosen or 0] <= 1.015 * best and (chosen is not None) == (paces[0] > 1.015 * best)


def test_played_seconds_are_means_of_steps_after_the_first_responses() -> None:
    task = Task(carrying(8), CLUSTER, LENGTHS)
    plan = make_plan(task, "exact", 1, 1, never, never).plans[0]
    steps = finalists._counted(task, plan.config, 3)
    assert len(steps) == 3 and steps[0].step > 3 and steps[0].clock > max(LENGTHS)
    assert played(task, plan, 3).step_ns == pytest.approx(1e9 * fmean(step.step_s for step in steps), rel=1e-6)
