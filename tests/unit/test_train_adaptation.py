"""Controllers are told of a step: figures of what was trained on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from oppo_megatron.chunks import Chunk, ChunkRow
from oppo_megatron.cluster.activity import Activity
from oppo_megatron.config.ppo import KLConfig
from oppo_megatron.control.chunk_tuner import ChunkTuner
from oppo_megatron.control.kl_controller import KLController
from oppo_megatron.data.prompts import PromptStream
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import Decision, StepSignals
from oppo_megatron.schedule.actions import Op
from oppo_megatron.schedule.weaving.costs import CostMeter, Costs
from oppo_megatron.train import updates
from oppo_megatron.train.logs.journal import StepFacts
from oppo_megatron.train.score_exchange import ScoreReport
from oppo_megatron.train.updates import Adaptation
from tests.unit.test_algorithms_experience import batch, config, of_ppo
from tests.unit.test_data_prompts import plain_set


class Listening:
    value = 0

    def __init__(self) -> None:
        self.told: list[StepSignals] = []

    def observe(self, step: int, signals: StepSignals) -> Decision:
        self.told.append(signals)
        return Decision(0, "", False)


@pytest.mark.parametrize(
    ("settings", "scores"),
    [
        ({}, [0.5, -7.0, 3.0]),
        ({"reward_clip": 1.0}, [0.5, -1.0, 1.0]),
        ({"reward_clip": 1.0, "truncated": -2.0}, [0.5, -1.0, -2.0]),
        ({"reward_clip": 1.0, "reward_normalization": "batch"}, [0.5, -1.0, 1.0]),  # whose mean would say nothing
    ],
)
def test_delta_is_told_the_scores_that_are_trained_on(settings: dict[str, Any], scores: list[float]) -> None:
    rule, buffer = Listening(), RolloutBuffer(3, 0, 1)
    scheduler = OvercommitScheduler(PromptStream(plain_set(3), 1), buffer, cast(Any, rule))
    tuner, kl = ChunkTuner([32, 16, 64], 8), KLController(KLConfig())
    nothing = cast(Any, None)  # worlds and planners have no part in this
    adaptation = Adaptation(nothing, scheduler, tuner, kl, nothing, CostMeter({"actor": 1}))
    facts = StepFacts(1, 0, 8)
    facts.scores = ScoreReport({}, 0.0, 0.0, [], {}, ess=1.0, measured=[])
    scheduler.begin_step()
    buffer.record(Chunk(0, 1, [ChunkRow(r.seq_id, 0, [1], [0.0], [0.0], version=0) for r in buffer.rollouts]))
    adaptation.learn_batch(facts, buffer.rollouts, of_ppo(config(**settings)).experience(batch(), 0.3))
    assert rule.told[0].reward_mean == pytest.approx(sum(scores) / 3)
    adaptation.learn_batch(facts, buffer.rollouts, of_ppo(config()).experience(batch(), 0.3), actor_trained=False)
    assert len(rule.told) == 1 and "warms up" in facts.delta_reason, "a policy that is not trained has no trend"


@pytest.mark.parametrize("generator", ["sequential", "woven"])
def test_a_run_s_costs_leave_out_the_first_step_and_woven_rounds_go_by_the_last(
    generator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill of 10 tokens a step takes 9, 4, 2 and 3 s."""
    monkeypatch.setattr(updates, "sum_over_ranks", lambda sums, device: list(sums))  # of one rank
    nothing, learned = cast(Any, None), list[float]()

    def read_s(costs: Costs) -> float:
        return costs.prefill_at("actor", 0)(10)

    planner = cast(Any, SimpleNamespace(generator=generator, learn=lambda costs: learned.append(read_s(costs))))
    world, meter = cast(Any, SimpleNamespace(device=None, activity=Activity())), CostMeter({"actor": 1})
    adaptation = Adaptation(world, nothing, nothing, nothing, planner, meter)
    assert adaptation.measured_costs() is None
    of_run = []
    for step, seconds in enumerate((9.0, 4.0, 2.0, 3.0), start=1):
        meter.add(Op.PREFILL, "actor", 0, 10, seconds)
        adaptation.learn_costs(step)
        costs = adaptation.measured_costs()
        assert costs is not None
        of_run.append(read_s(costs))
    assert of_run == pytest.approx([9.0, 4.0, 3.0, 3.0])
    late = [9.0, (4.5 + 4) / 1.5, (2.25 + 2 + 2) / 1.75, (1.125 + 1 + 1 + 3) / 1.875]
    assert learned == pytest.approx(late if generator == "woven" else [])
