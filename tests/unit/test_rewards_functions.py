"""The reward sum: weights, a user's functions, and failures that are never scores."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.rewards import RewardPart
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.rewards.functions import build_reward_functions
from oppo_megatron.rewards.protocol import ScoreItem

MODULE = """
import numpy

class Lengths:
    @staticmethod
    def count(prompt, response, fields, scale=1.0):
        return len(response) * scale

def numpy_scalar(prompt, response, fields):
    return numpy.float32(0.5)
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "user_rewards"


def python(entry_point: str, **settings: Any) -> RewardPart:
    return RewardPart(kind="python", entry_point=entry_point, **settings)


def test_weighted_sum_of_all_kinds(user_module: str) -> None:
    rewards = build_reward_functions(
        [
            RewardPart(kind="model", weight=0.5),
            RewardPart(kind="verifier", name="gsm8k", weight=2.0),
            python(f"{user_module}:Lengths.count", weight=-1.0, options={"scale": 0.1}),
            python(f"{user_module}:numpy_scalar"),
        ]
    )
    assert rewards.reads_model()
    reward = rewards.evaluate("q", "#### 5", {"answer": "5"}, model_score=3.0, seq_id=1)
    assert reward.parts == {
        "model": 3.0,
        "gsm8k": 1.0,
        f"{user_module}:Lengths.count": pytest.approx(0.6),
        f"{user_module}:numpy_scalar": 0.5,
    }
    assert reward.total == pytest.approx(1.5 + 2.0 - 0.6 + 0.5)
    assert rewards.score("q", "#### 5", {"answer": "5"}, 3.0, 1) == reward.total


def test_equal_parts_keep_their_own_labels() -> None:
    parts = [RewardPart(kind="verifier", name="gsm8k", answer=column) for column in ("a", "b", "c")]
    rewards = build_reward_functions(parts)
    reward = rewards.evaluate("", "#### 1", {"a": 1, "b": 2, "c": 1}, None, 0)
    assert list(reward.parts.values()) == [1.0, 0.0, 1.0] and reward.total == 2.0 and not rewards.reads_model()


@pytest.mark.parametrize("score", [None, math.nan, -math.inf])
def test_a_missing_or_broken_model_score_is_an_error(score: float | None) -> None:
    with pytest.raises(RewardError, match="sequence 7.*'model' gave .*(not a number; give one|must be finite: correct)"):
        build_reward_functions([RewardPart(kind="model")]).score("", "", {}, score, 7)


def test_an_overflowing_sum_is_an_error() -> None:
    rewards = build_reward_functions([RewardPart(kind="model", weight=1e300)])
    with pytest.raises(RewardError, match="sequence 7: the weighted sum"):
        rewards.score("", "", {}, 1e300, 7)


def test_rows_are_checked_before_the_run() -> None:
    rewards = build_reward_functions([RewardPart(kind="verifier", name="gsm8k"), RewardPart(kind="model")])
    rewards.check({"answer": "#### 4"})
    with pytest.raises(RewardError, match=r"gsm8k.*no column 'answer'.*it has: other"):
        rewards.check({"other": 1})
    with pytest.raises(RewardError, match=r"gsm8k.*'many' has no number"):
        rewards.check({"answer": "many"})
    with pytest.raises(RewardError, match="sequence 9.*no column 'answer'"):
        rewards.score("", "#### 1", {}, 0.0, 9)


def test_incomplete_parts_are_all_named() -> None:
    incomplete = [RewardPart(kind="verifier"), python("no_colon"), RewardPart(kind="model", options={"a": 1})]
    with pytest.raises(ConfigError) as caught:
        build_reward_functions([RewardPart(kind="verifier", name="gsm8k"), *incomplete])
    found = caught.value.problems
    assert len(found) == 3 and all(f"rewards.{i}" in problem for i, problem in enumerate(found, start=1))


def test_every_entry_point_that_fails_is_named(user_module: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_reward_functions([python(f"{user_module}:absent"), python("absent_module:f")])
    assert len(caught.value.problems) == 2


def test_parts_that_are_known_are_not_evaluated_again() -> None:
    rewards = build_reward_functions(
        [python("tests.e2e.rewards:failing", weight=2.0), RewardPart(kind="verifier", name="gsm8k"), RewardPart(kind="model")]
    )
    item = ScoreItem(3, "q", "#### 5", {"answer": "5"})
    assert rewards.parts(item, None, of=["gsm8k"]) == {"gsm8k": 1.0}, "no other part is looked at"
    assert rewards.reads_model(["gsm8k", "model"]) and not rewards.reads_model(["gsm8k"])
    with pytest.raises(RewardError, match="no opinion"):
        rewards.evaluate("q", "#### 5", {"answer": "5"}, 0.5, 3)
    known = {"tests.e2e.rewards:failing": 0.25}
    reward = rewards.evaluate("q", "#### 5", {"answer": "5"}, 0.5, 3, known=known)
    assert reward.total == 2.0 * 0.25 + 1.0 + 0.5 and list(reward.parts) == ["tests.e2e.rewards:failing", "gsm8k", "model"]
    with pytest.raises(RewardError, match="'tests.e2e.rewards:failing' gave nan"):
        rewards.evaluate("q", "#### 5", {"answer": "5"}, 0.5, 3, known={"tests.e2e.rewards:failing": math.nan})
