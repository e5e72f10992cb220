"""The filter and long responses as a configuration resolves them, and every rule of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.derived import describe_batch, most_judged
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.preflight.validate import check_train
from tests.unit.test_preflight_settings import put, settings_without_critic


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return settings_without_critic(tmp_path) | {
        "rewards": [{"kind": "verifier", "name": "gsm8k"}, {"kind": "python", "entry_point": "tests.e2e.rewards:failing"}],
        "rollout": {"batch_size": 32, "max_response_tokens": 100},
        "algorithm": {"preset": "dapo"},
        "overlap": {"backfill": True, "delta": {"initial": 1, "max": 2}},
    }


def test_dapo_filters_groups_where_backfill_can_replace_them(settings: dict[str, Any]) -> None:
    config = TrainConfig.model_validate(settings)
    assert config.filter == "reward" and check_train(config) == []
    assert most_judged(config) == 20
    assert TrainConfig.model_validate(config.model_dump()) == config, "a resolved file is read as it is"
    for changes in ({"filter": None}, {"overlap": {"backfill": False, "delta": {"initial": 1, "max": 2}}}):
        config = TrainConfig.model_validate(settings | changes)
        assert config.filter is None and check_train(config) == []
        assert TrainConfig.model_validate(config.model_dump()) == config
        assert "groups of equal reward are trained, too" in describe_batch(config)
    given = TrainConfig.model_validate(settings | {"filter": "gsm8k"})
    assert given.filter == "gsm8k"
    assert TrainConfig.model_validate(settings | {"algorithm": {"preset": "gspo"}}).filter is None


def test_dapo_brings_the_backfill_that_its_filter_needs(settings: dict[str, Any]) -> None:
    """Brings none where it was refused, nor without carried rollouts, which is what backfill fills batches from."""
    bare = {**settings, "overlap": {"delta": {"initial": 1, "max": 2}}}
    config = TrainConfig.model_validate(bare)
    assert config.overlap.backfill is True and config.filter == "reward" and check_train(config) == []
    assert "equal reward" not in describe_batch(config)
    plain = TrainConfig.model_validate(bare | {"filter": None})
    assert plain.overlap.backfill is False and plain.filter is None
    alone = TrainConfig.model_validate(bare | {"overlap": {"inter": False, "delta": {"initial": 1, "max": 2}}})
    assert alone.overlap.backfill is False and alone.filter is None
    assert TrainConfig.model_validate(bare | {"algorithm": {"preset": "grpo"}}).overlap.backfill is False


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"overlap.backfill": False, "filter": "reward"},
            "filter is set, but overlap.backfill is false, and nothing would take the places",
        ),
        (
            {"algorithm.preset": "reinforce_pp", "filter": "reward"},
            "filter is set, but rollout.group_size is 1, and every group would be dropped",
        ),
        ({"filter": "gsm8"}, "filter is 'gsm8', but no part of rewards has that name; did you mean `gsm8k`?"),
        ({"filter": "acc"}, "no part of rewards has that name; choose from reward, gsm8k, tests.e2e.rewards:failing"),
    ],
)
def test_broken_rule_is_the_one_problem(settings: dict[str, Any], changes: dict[str, Any], expected: str) -> None:
    for key, value in changes.items():
        put(settings, key, value)
    problems = check_train(TrainConfig.model_validate(settings))
    assert len(problems) == 1 and expected in problems[0], problems
