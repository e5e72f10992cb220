"""`settle` as a configuration resolves it; what `certain` refuses stands in `test_settled_gradient.py`, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.derived import describe_settle, longest_chunk, settle_period
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.preflight.settings import check_train
from tests.unit.test_preflight_settings import put, settings_without_critic


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return settings_without_critic(tmp_path) | {
        "rewards": [{"kind": "verifier", "name": "gsm8k_first"}, {"kind": "verifier", "name": "multiple_choice"}],
        "rollout": {"batch_size": 8, "max_response_tokens": 100},
        "algorithm": {"preset": "dr_grpo"},
        "overlap": {"inter": False},
        "settle": {"mode": "certain"},
    }


def config_of(settings: dict[str, Any], **changes: Any) -> TrainConfig:
    for key, value in changes.items():
        put(settings, key, value)
    return TrainConfig.model_validate(settings)


def test_rewards_are_asked_by_a_clock_of_the_configuration(settings: dict[str, Any]) -> None:
    config = config_of(settings)
    assert check_train(config) == [] and settle_period(config) == longest_chunk(config) == 32
    assert describe_settle(config) == [
        "settle certain: rewards are asked every 32 decode steps; one group of 16 is decoded to its end and checked"
    ]
    backfilled = config_of(settings, **{"overlap": {"inter": True, "backfill": 64}})
    assert settle_period(backfilled) == 64
    assert settle_period(config_of(settings, **{"settle.every": 20})) == 20 == longest_chunk(backfilled) - 44
    off = config_of(settings, **{"settle": {"mode": False}})
    assert settle_period(off) is None and describe_settle(off) == []


def test_a_filter_without_delta_carries_nothing(settings: dict[str, Any]) -> None:
    overlap = {"inter": True, "backfill": True, "delta": {"initial": 0, "max": 0}}
    assert check_train(config_of(settings, overlap=overlap, filter={})) == []
    (problem,) = check_train(config_of(settings, overlap=overlap | {"delta": {"initial": 0, "max": 2}}))
    assert "overlap.inter is true and carries" in problem, "delta may grow"
    (problem,) = check_train(config_of(settings, overlap=overlap, filter=None))
    assert "overlap.inter is true and carries responses to the next step" in problem, "backfill alone begins the next batch"


def test_a_loss_of_pairs_is_refused_with_a_remedy_that_there_is(settings: dict[str, Any]) -> None:
    (problem,) = check_train(config_of(settings, **{"algorithm.preset": "online_dpo"}))
    assert problem == (
        "settle.mode is certain, but algorithm.preset is online_dpo, and the loss of a pair depends on all tokens of its "
        "responses; choose one whose loss is a sum over tokens (dr_grpo), or set settle.mode to predicted, which is biased, or "
        "to off"
    )


def test_predicted_says_that_it_is_biased(settings: dict[str, Any]) -> None:
    config = config_of(settings, **{"settle": {"mode": "predicted", "audit": 0}, "algorithm.preset": "grpo"})
    assert check_train(config) == []
    assert describe_settle(config) == [
        "settle predicted: rewards are asked every 32 decode steps; no group is checked at its end",
        "WARNING: settle.mode is predicted: the gradient is biased towards short responses, see docs/algorithm.md",
    ]


@pytest.mark.parametrize("mode", ["certain", "predicted"])
@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"kind": "verifier", "name": "arithmetic"}, "'arithmetic' goes by the last answer in a response (rule gsm8k_first"),
        ({"kind": "verifier", "name": "gsm8k", "lenient": True}, "'gsm8k' goes by the last answer in a response"),
        ({"kind": "verifier", "name": "math"}, "'math' is of rule math, which reads the end of a response"),
        ({"kind": "verifier", "name": "length", "buffer_tokens": 4}, "'length' is of rule length, which reads the end"),
        ({"kind": "http", "url": "http://127.0.0.1:1/score"}, "is a service's score"),
    ],
)
def test_parts_that_settle_nothing_are_refused(settings: dict[str, Any], mode: str, part: dict[str, Any], why: str) -> None:
    (problem,) = check_train(config_of(settings, **{"rewards": [part], "settle.mode": mode}))
    assert problem.startswith(f"settle.mode is {mode}, but reward part ") and why in problem
    assert problem.endswith("set settle.mode to off, or leave the part out")


def test_a_reward_model_settles_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    model = {"rewards": [{"kind": "model"}], "reward": {"checkpoint": tmp_path / "actor"}}
    (problem,) = check_train(config_of(settings, **model))
    assert "reward part 'model' is a model's score" in problem


@pytest.mark.parametrize(("name", "value"), [("every", 8), ("audit", 1)])
def test_settings_that_nothing_reads_are_refused(settings: dict[str, Any], name: str, value: int) -> None:
    (problem,) = check_train(config_of(settings, settle={"mode": "off", name: value}))
    assert problem.startswith(f"settle.{name} is {value}, but settle.mode is off, and nothing reads it")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settle.every": 100}, "settle.every is 100 decode steps, but rollout.max_response_tokens is 100, so that"),
        ({"overlap.chunk.tokens": 128}, "settle.every is null, and rewards are asked every 128 decode steps"),
    ],
)
def test_rewards_are_asked_before_responses_end(settings: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    (problem,) = check_train(config_of(settings, **changes))
    assert problem.startswith(said)
    assert check_train(config_of(settings, **(changes | {"settle.every": 99}))) == []
