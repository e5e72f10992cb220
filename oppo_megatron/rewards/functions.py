"""The reward of a finished response: a weighted sum of a reward model's score, verifiers and a user's functions."""

from __future__ import annotations

import importlib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from oppo_megatron.config.checks import check_rewards
from oppo_megatron.config.data import RewardPart
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.rewards.verifiers import expected_answer, verify


class ResponseReward(Protocol):
    """Scores one response.  `fields` are the other columns of the prompt's row."""

    def __call__(self, prompt: str, response: str, fields: Mapping[str, Any]) -> float: ...


@dataclass(frozen=True, slots=True)
class VerifierReward:
    """1.0 or 0.0 by the verifier `name`, against column `answer`."""

    name: str
    answer: str

    def __call__(self, prompt: str, response: str, fields: Mapping[str, Any]) -> float:
        return verify(self.name, response, self._expected(fields))

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise `RewardError` if a response to this row could not be scored."""
        expected_answer(self._expected(fields))

    def _expected(self, fields: Mapping[str, Any]) -> Any:
        if self.answer not in fields:
            there = ", ".join(fields) or "none"
            raise RewardError(
                f"the row has no column {self.answer!r} with the expected answer (it has: {there}); name the column "
                "as `answer` beside the verifier"
            )
        return fields[self.answer]


def load_entry_point(entry_point: str) -> Any:
    """The callable at `package.module:function`.  Raises `ConfigError` if it cannot be had."""
    module_name, colon, attribute = entry_point.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"entry_point={entry_point!r} is not of the form package.module:function")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"entry_point={entry_point!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error})"
            "; install it, or put its folder on PYTHONPATH"
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"entry_point={entry_point!r}: {module_name!r} has no {attribute!r}; correct the name")
        found = getattr(found, name)
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"entry_point={entry_point!r} is a {kind}, not a function of (prompt, response, fields)")
    return found


@dataclass(frozen=True, slots=True)
class Summand:
    """One part of the sum; `function` is None for the reward model's score."""

    label: str
    weight: float
    function: ResponseReward | None


@dataclass(frozen=True, slots=True)
class Reward:
    """A response's reward, and what each part gave before weighting, by label."""

    total: float
    parts: dict[str, float]


def build_reward_functions(parts: Sequence[RewardPart]) -> RewardSum:
    """The sum that `parts` describe.  Raises `ConfigError` with every problem of every part."""
    has_model = any(part.kind == "model" for part in parts)
    found = check_rewards(parts, has_reward_model=has_model)
    summands: list[Summand] = []
    labels: set[str] = set()
    for part in parts if not found else ():
        name = {"model": "model", "verifier": part.name, "python": part.entry_point}[part.kind]
        assert name is not None, "check_rewards asks for it"
        label = name if name not in labels else f"{name}#{len(labels) + 1}"
        labels.add(label)
        try:
            summands.append(Summand(label, part.weight, _function(part)))
        except ConfigError as error:
            found.extend(error.problems)
    if found:
        raise ConfigError(found)
    return RewardSum(summands)


def _function(part: RewardPart) -> ResponseReward | None:
    if part.kind == "model":
        return None
    if part.kind == "verifier":
        assert part.name is not None, "check_rewards asks for it"
        return VerifierReward(part.name, part.answer)
    assert part.entry_point is not None, "check_rewards asks for it"
    function = load_entry_point(part.entry_point)
    return partial(function, **part.options) if part.options else function  # type: ignore[no-any-return]


class RewardSum:
    """The weighted sum of the parts.  A part that fails or gives no finite number is an error, never a score."""

    def __init__(self, summands: Sequence[Summand]):
        self.summands = list(summands)

    @property
    def needs_model(self) -> bool:
        """Whether a reward model's score is one of the parts."""
        return any(summand.function is None for summand in self.summands)

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise `RewardError` if a row lacks what a verifier needs."""
        for summand in self.summands:
            if isinstance(summand.function, VerifierReward):
                try:
                    summand.function.check(fields)
                except RewardError as error:
                    raise RewardError(f"reward part {summand.label!r}: {error}") from error

    def score(
        self, prompt: str, response: str, fields: Mapping[str, Any], model_score: float | None, seq_id: int
    ) -> float:
        """The reward of one response."""
        return self.evaluate(prompt, response, fields, model_score, seq_id).total

    def evaluate(
        self, prompt: str, response: str, fields: Mapping[str, Any], model_score: float | None, seq_id: int
    ) -> Reward:
        """The reward of one response and its parts.  Raises `RewardError` naming sequence, part and value."""
        parts: dict[str, float] = {}
        for summand in self.summands:
            value: Any = model_score
            if summand.function is not None:
                try:
                    value = summand.function(prompt, response, fields)
                except Exception as error:
                    raise RewardError(
                        f"sequence {seq_id}: reward part {summand.label!r} failed with {type(error).__name__}: {error}; "
                        "it must give a number for every response: correct the function, or the row's columns"
                    ) from error
            parts[summand.label] = _finite(value, f"sequence {seq_id}: reward part {summand.label!r}")
        total = sum(summand.weight * parts[summand.label] for summand in self.summands)
        return Reward(_finite(total, f"sequence {seq_id}: the weighted sum of {parts}"), parts)


def _finite(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{what} gave {value!r} ({type(value).__name__}), not a number; give one finite float")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"{what} gave {number}; a reward must be finite: correct the function, the reward model's weights or the "
            "part's weight, whichever gave it"
        )
    return number
