"""The reward of a finished response: a weighted sum of a reward model's score, verifiers, a user's functions and services."""

from __future__ import annotations

import inspect
import math
import numbers
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from oppo_megatron.config.data import RewardPart
from oppo_megatron.config.evaluation import part_labels
from oppo_megatron.config.reward_rules import check_rewards
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.plugins import SHOWN_CHARACTERS, load_entry_point, said_of
from oppo_megatron.rewards.isolated_rule import IsolatedRule
from oppo_megatron.rewards.isolation import IsolatedFunction
from oppo_megatron.rewards.protocol import ScoreItem, check_fields, read_token
from oppo_megatron.rewards.remote import RemoteReward
from oppo_megatron.rewards.rule_parts import Rule, VerifierReward, build_rule
from oppo_megatron.rewards.rules.lengths import LengthRule
from oppo_megatron.rewards.user_code import ProcessExit, staying

NOTHING_KNOWN: Mapping[str, float] = MappingProxyType({})


class NonFiniteRewardError(RewardError):
    """A reward is NaN or infinite: a number, but no score."""


class ResponseReward(Protocol):
    """Scores one response.  `fields` are the other columns of the prompt's row."""

    def __call__(self, prompt: str, response: str, fields: Mapping[str, Any]) -> float: ...


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A user's function, called in this process.  Raises RewardError if it raises, or asks to end the process."""

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
    function: ResponseReward | RemoteReward | Rule | None


@dataclass(frozen=True, slots=True)
class Reward:
    """A response's reward, and what each part gave before weighting, by label."""

    total: float
    parts: dict[str, float]


def build_reward_functions(
    parts: Sequence[RewardPart],
    environment: Mapping[str, str] = os.environ,
    *,
    max_response_tokens: int | None = None,
) -> RewardSum:
    """The sum that `parts` describe; tokens of services come from `environment`.

    `max_response_tokens`: the longest response, where that is known: rule `length` goes by it.  Raises `ConfigError` with
    every problem of every part.
    """
    has_model = any(part.reads_model for part in parts)
    found = check_rewards(parts, has_reward_model=has_model)
    summands: list[Summand] = []
    secrets = {part.token_env for part in parts}
    inherited = {name: value for name, value in environment.items() if name not in secrets}
    for part, label in zip(parts, part_labels(parts), strict=True) if not found else ():
        try:
            function = _function(part, label, environment, inherited, max_response_tokens)
            summands.append(Summand(label, part.weight, function))
        except ConfigError as error:
            found.extend(error.problems)
    if found:
        raise ConfigError(found)
    return RewardSum(summands)


def _function(
    part: RewardPart,
    label: str,
    environment: Mapping[str, str],
    inherited: Mapping[str, str],
    max_response_tokens: int | None,
) -> ResponseReward | RemoteReward | Rule | None:
    """`inherited`: the environment without the tokens of services, for processes."""
    if part.reads_model:
        return None
    if part.kind == "verifier":
        return build_rule(part, inherited, max_response_tokens)
    if part.kind == "http":
        assert part.url is not None, "check_rewards asks for it"
        token = None if part.token_env is None else read_token(part.token_env, environment)
        return RemoteReward(f"reward part {label!r}", part.url, token, part.remote)
    assert part.entry_point is not None, "check_rewards asks for it"
    if part.isolation is not None:
        isolated = IsolatedFunction(part.entry_point, part.options, part.isolation, inherited)
        isolated.check()
        return isolated
    function, options = load_entry_point(part.entry_point, part.options), part.options
    return UserFunction(part.entry_point, partial(function, **options) if options else function)


def _about(function: ResponseReward | RemoteReward | Rule | None) -> str:
    if isinstance(function, IsolatedRule):
        return function.about()
    if not isinstance(function, UserFunction):
        return ""
    called = function.function.func if isinstance(function.function, partial) else function.function
    return (inspect.getdoc(called) or "").partition("\n")[0]


class RewardSum:
    """The weighted sum of the parts.  A part that fails or gives no finite number is an error, never a score."""

    def __init__(self, summands: Sequence[Summand]):
        self.summands = list(summands)

    @property
    def needs_model(self) -> bool:
        """True if a reward model's score is one of the parts."""
        return any(summand.function is None for summand in self.summands)

    def describe(self) -> list[str]:
        """Return the first line of the docstring of each user's function that runs in this process.

        For rule `code`, report whether its programs can reach the network.
        """
        told = ((part.label, _about(part.function)) for part in self.summands)
        return [f"reward {label}: {about}" for label, about in told if about]

    @property
    def user_functions(self) -> list[str]:
        """The user's functions that run in this process, by label: a crash of native code in one is the process's end."""
        return [summand.label for summand in self.summands if isinstance(summand.function, UserFunction)]

    @property
    def asks_services(self) -> bool:
        """True if scores take time: `request` them as soon as the responses are known."""
        return bool(self._asked)

    @property
    def _asked(self) -> list[RemoteReward | IsolatedRule]:
        """Services, and rules in processes of their own."""
        return [s.function for s in self.summands if isinstance(s.function, (RemoteReward, IsolatedRule))]

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise `RewardError` if a row lacks what a verifier needs, or cannot be sent to a service or a process."""
        for summand in self.summands:
            try:
                if isinstance(summand.function, (VerifierReward, IsolatedRule)):
                    summand.function.check(fields)
                elif isinstance(summand.function, (RemoteReward, IsolatedFunction)):
                    check_fields(fields)
            except RewardError as error:
                raise RewardError(f"reward part {summand.label!r}: {error}") from error

    def unusable(self, rows: Sequence[Mapping[str, Any]], tell: Callable[[str], None] = print) -> dict[int, str]:
        """Return, by place, why a rule cannot score a row within its limits; `check` has accepted all `rows`."""
        found = dict[int, str]()
        for summand in self.summands:
            if isinstance(summand.function, IsolatedRule):
                for place, reason in summand.function.unusable(rows, tell).items():
                    found.setdefault(place, f"reward part {summand.label!r}: {reason}")
        return found

    def reads_model(self, labels: Collection[str]) -> bool:
        """True if one of these parts is the reward model's score."""
        return any(summand.function is None for summand in self.summands if summand.label in labels)

    def requested(self, seq_id: int) -> bool:
        """True if each part has been asked for this sequence's score, and `evaluate` has not taken it."""
        return all(asked.requested(seq_id) for asked in self._asked)

    def request(self, items: Sequence[ScoreItem], known: Collection[str] = ()) -> None:
        """Ask services and processes for scores, which `evaluate` takes later; returns at once, asks for nothing twice.

        Parts that are `known` are not asked for.  Raises `RewardError` if a service has failed for good.
        """
        for summand in self.summands:
            if isinstance(summand.function, RemoteReward | IsolatedRule) and summand.label not in known:
                summand.function.request(items)

    def forget(self, seq_id: int) -> None:
        """No score of this sequence will be taken any more."""
        for summand in self.summands:
            if isinstance(summand.function, RemoteReward | IsolatedRule):
                summand.function.forget(seq_id)

    def close(self) -> None:
        """End threads and processes."""
        for summand in self.summands:
            if isinstance(summand.function, (RemoteReward, IsolatedFunction, IsolatedRule)):
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
        num_tokens: int | None = None,
        known: Mapping[str, float] = NOTHING_KNOWN,
    ) -> Reward:
        """The reward of one response and its parts; those that are `known` already are taken as they are.

        Raises as `parts` does.
        """
        item = ScoreItem(seq_id, prompt, response, fields)
        parts = self.parts(item, model_score, place, num_tokens, known=known)
        return Reward(_finite(self.total(parts), f"{_of(item, place)}: the weighted sum of {parts}"), parts)

    def total(self, parts: Mapping[str, float]) -> float:
        """The weighted sum of all parts."""
        return sum(summand.weight * parts[summand.label] for summand in self.summands)

    def parts(
        self,
        item: ScoreItem,
        model_score: float | None,
        place: str = "",
        num_tokens: int | None = None,
        *,
        of: Collection[str] | None = None,
        known: Mapping[str, float] = NOTHING_KNOWN,
    ) -> dict[str, float]:
        """The parts `of` a response (None: all), by label; waits for what was requested, and requests what was not.

        `num_tokens`: of the response; rule `length` needs it.  Raises `RewardError` naming sequence, `place` (file:line of the
        prompt's row), part and value.
        """
        sequence, parts = _of(item, place), dict[str, float]()
        wanted = [summand for summand in self.summands if of is None or summand.label in of]
        asked = {summand.label for summand in wanted} - known.keys()
        self.request([item], {summand.label for summand in self.summands} - asked)
        try:
            for summand in wanted:
                new = summand.label not in known
                value = _value(summand, item, model_score, sequence, num_tokens) if new else known[summand.label]
                parts[summand.label] = _finite(value, f"{sequence}: reward part {summand.label!r}")
        except RewardError:
            for each in self._asked:
                if isinstance(each, IsolatedRule):  # a reward service keeps running, and sequence names are reused
                    each.forget(item.seq_id)
            raise
        return parts


def _value(summand: Summand, item: ScoreItem, model_score: float | None, sequence: str, num_tokens: int | None) -> Any:
    """Return the part's value for a response.  Raises `RewardError` if it fails."""
    if summand.function is None:
        return model_score
    if isinstance(summand.function, RemoteReward):
        return summand.function.result(item.seq_id)
    if isinstance(summand.function, LengthRule):
        assert num_tokens is not None, "who takes a rule `length` counts the tokens"
        return summand.function.score(num_tokens)
    try:
        if isinstance(summand.function, IsolatedRule):
            return summand.function.result(item.seq_id)
        return summand.function(item.prompt, item.response, item.fields)
    except RewardError as error:
        raise RewardError(
            f"{sequence}: reward part {summand.label!r} failed: {error}; it must give a number for every "
            "response: correct the function, or the row's columns"
        ) from (error.__cause__ or error)


def _of(item: ScoreItem, place: str) -> str:
    return f"sequence {item.seq_id} (of {place})" if place else f"sequence {item.seq_id}"


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
