"""The reward of a finished response: a weighted sum of a reward model's score, verifiers, a user's functions and services."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from oppo_megatron.config.data import RewardPart
from oppo_megatron.config.evaluation import part_labels
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.preflight.settings import check_rewards
from oppo_megatron.rewards.entry_point import load_entry_point
from oppo_megatron.rewards.isolation import IsolatedFunction
from oppo_megatron.rewards.protocol import ScoreItem, check_fields, read_token
from oppo_megatron.rewards.remote import RemoteReward
from oppo_megatron.rewards.user_code import SHOWN_CHARACTERS, ProcessExit, said_of, staying
from oppo_megatron.rewards.verifiers import expected_answer, verify


class NonFiniteRewardError(RewardError):
    """A reward is NaN or infinite: a number, but no score."""


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
            near = difflib.get_close_matches(self.answer, fields, n=1)
            named = f", the nearest is `answer: {near[0]}`" if near else ""
            raise RewardError(
                f"the row has no column {self.answer!r} with the expected answer (it has: {there}); name the column "
                f"as `answer` beside the verifier{named}"
            )
        return fields[self.answer]


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A user's function, called in this process; RewardError where it raises, or asks to end the process."""

    entry_point: str
    function: ResponseReward

    def __call__(self, prompt: str, response: str, fields: Mapping[str, Any]) -> float:
        try:
            with staying():
                return self.function(prompt, response, fields)
        except (SystemExit, ProcessExit) as error:
            raise RewardError(f"it asked to end the process ({said_of(error)}); return a number, or raise") from error
        except Exception as error:
            raise RewardError(said_of(error)) from error


@dataclass(frozen=True, slots=True)
class Summand:
    """One part of the sum; `function` is None for the reward model's score."""

    label: str
    weight: float
    function: ResponseReward | RemoteReward | None


@dataclass(frozen=True, slots=True)
class Reward:
    """A response's reward, and what each part gave before weighting, by label."""

    total: float
    parts: dict[str, float]


def build_reward_functions(parts: Sequence[RewardPart], environment: Mapping[str, str] = os.environ) -> RewardSum:
    """The sum that `parts` describe; tokens of services come from `environment`.

    Raises `ConfigError` with every problem of every part.
    """
    has_model = any(part.reads_model for part in parts)
    found = check_rewards(parts, has_reward_model=has_model)
    summands: list[Summand] = []
    secrets = frozenset(part.token_env for part in parts if part.token_env is not None)
    for part, label in zip(parts, part_labels(parts), strict=True) if not found else ():
        try:
            summands.append(Summand(label, part.weight, _function(part, label, environment, secrets)))
        except ConfigError as error:
            found.extend(error.problems)
    if found:
        raise ConfigError(found)
    return RewardSum(summands)


def _function(
    part: RewardPart, label: str, environment: Mapping[str, str], secrets: frozenset[str]
) -> ResponseReward | RemoteReward | None:
    if part.reads_model:
        return None
    if part.kind == "verifier":
        assert part.name is not None, "check_rewards asks for it"
        return VerifierReward(part.name, part.answer)
    if part.kind == "http":
        assert part.url is not None, "check_rewards asks for it"
        token = None if part.token_env is None else read_token(part.token_env, environment)
        return RemoteReward(f"reward part {label!r}", part.url, token, part.remote)
    assert part.entry_point is not None, "check_rewards asks for it"
    if part.isolation is not None:
        inherited = {name: value for name, value in environment.items() if name not in secrets}
        isolated = IsolatedFunction(part.entry_point, part.options, part.isolation, inherited)
        isolated.check()
        return isolated
    function = load_entry_point(part.entry_point, part.options)
    return UserFunction(part.entry_point, partial(function, **part.options) if part.options else function)


def _about(user: UserFunction) -> str:
    function = user.function.func if isinstance(user.function, partial) else user.function
    return (inspect.getdoc(function) or "").partition("\n")[0]


class RewardSum:
    """The weighted sum of the parts.  A part that fails or gives no finite number is an error, never a score."""

    def __init__(self, summands: Sequence[Summand]):
        self.summands = list(summands)

    @property
    def needs_model(self) -> bool:
        """Whether a reward model's score is one of the parts."""
        return any(summand.function is None for summand in self.summands)

    def describe(self) -> list[str]:
        """What each user's function that runs in this process says of itself: the first line of its docstring."""
        told = ((part.label, _about(part.function)) for part in self.summands if isinstance(part.function, UserFunction))
        return [f"reward {label}: {about}" for label, about in told if about]

    @property
    def user_functions(self) -> list[str]:
        """The user's functions that run in this process, by label: a crash of native code in one is the process's end."""
        return [summand.label for summand in self.summands if isinstance(summand.function, UserFunction)]

    @property
    def asks_services(self) -> bool:
        """Whether scores take a while to come: `request` them as early as the responses are known."""
        return any(isinstance(summand.function, RemoteReward) for summand in self.summands)

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise `RewardError` if a row lacks what a verifier needs, or cannot be sent to a service or a process."""
        for summand in self.summands:
            try:
                if isinstance(summand.function, VerifierReward):
                    summand.function.check(fields)
                elif isinstance(summand.function, (RemoteReward, IsolatedFunction)):
                    check_fields(fields)
            except RewardError as error:
                raise RewardError(f"reward part {summand.label!r}: {error}") from error

    def requested(self, seq_id: int) -> bool:
        """Whether every service has been asked for the score of this sequence, and `evaluate` has not taken it."""
        return all(s.function.requested(seq_id) for s in self.summands if isinstance(s.function, RemoteReward))

    def request(self, items: Sequence[ScoreItem]) -> None:
        """Ask the services for scores, which `evaluate` takes later; returns at once, asks for nothing twice.

        Raises `RewardError` if a service has failed for good.
        """
        for summand in self.summands:
            if isinstance(summand.function, RemoteReward):
                summand.function.request(items)

    def close(self) -> None:
        """End threads and processes."""
        for summand in self.summands:
            if isinstance(summand.function, (RemoteReward, IsolatedFunction)):
                summand.function.close()

    def score(
        self, prompt: str, response: str, fields: Mapping[str, Any], model_score: float | None, seq_id: int
    ) -> float:
        """The reward of one response."""
        return self.evaluate(prompt, response, fields, model_score, seq_id).total

    def evaluate(
        self,
        prompt: str,
        response: str,
        fields: Mapping[str, Any],
        model_score: float | None,
        seq_id: int,
        place: str = "",
    ) -> Reward:
        """The reward of one response and its parts; waits for what was requested, and requests what was not.

        Raises `RewardError` naming sequence, `place` (file:line of the prompt's row), part and value.
        """
        sequence = f"sequence {seq_id} (of {place})" if place else f"sequence {seq_id}"
        parts: dict[str, float] = {}
        self.request([ScoreItem(seq_id, prompt, response, fields)])
        for summand in self.summands:
            value: Any = model_score
            if isinstance(summand.function, RemoteReward):
                value = summand.function.result(seq_id)
            elif summand.function is not None:
                try:
                    value = summand.function(prompt, response, fields)
                except RewardError as error:
                    raise RewardError(
                        f"{sequence}: reward part {summand.label!r} failed: {error}; it must give a number for every "
                        "response: correct the function, or the row's columns"
                    ) from (error.__cause__ or error)
            parts[summand.label] = _finite(value, f"{sequence}: reward part {summand.label!r}")
        total = sum(summand.weight * parts[summand.label] for summand in self.summands)
        return Reward(_finite(total, f"{sequence}: the weighted sum of {parts}"), parts)


def _finite(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real):
        remedy = "give one finite float"
        if value is None:
            remedy += ": without `return` a function gives None"
        elif hasattr(value, "item"):
            remedy += ": `.item()` makes one of an array or tensor with one value"
        elif isinstance(value, (list, tuple, dict)):
            remedy += ": it is called once for each response"
        raise RewardError(
            f"{what} gave {repr(value)[:SHOWN_CHARACTERS]} ({type(value).__name__}), not a number; {remedy}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NonFiniteRewardError(
            f"{what} gave {number}; a reward must be finite: correct the function, the reward model's weights or the "
            "part's weight, whichever gave it"
        )
    return number
