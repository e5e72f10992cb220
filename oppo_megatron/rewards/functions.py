from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from oppo_megatron.config.rewards import RewardPart, check_rewards, part_labels
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.plugins import SHOWN_CHARACTERS, load_entry_point
from oppo_megatron.rewards.isolation import IsolatedFunction
from oppo_megatron.rewards.parts import Fields, ModelScore, Part, UserFunction
from oppo_megatron.rewards.protocol import ScoreItem, read_token
from oppo_megatron.rewards.remote import RemoteReward
from oppo_megatron.rewards.rule_parts import build_rule

NOTHING_KNOWN: Mapping[str, float] = MappingProxyType({})


class NonFiniteRewardError(RewardError):
    """NaN or infinite: a number, but no score."""


@dataclass(frozen=True, slots=True)
class Summand:
    label: str
    weight: float
    function: Part


@dataclass(frozen=True, slots=True)
class Reward:
    """`parts` before weighting, by label."""

    total: float
    parts: dict[str, float]


def build_reward_functions(
    parts: Sequence[RewardPart], environment: Mapping[str, str] = os.environ, *, max_response_tokens: int | None = None
) -> RewardSum:
    """Child processes do not inherit the tokens of services. Raises ConfigError with all problems."""
    found = check_rewards(parts, has_reward_model=any(part.reads_model for part in parts))
    summands: list[Summand] = []
    secrets = {part.token_env for part in parts}
    inherited = {name: value for name, value in environment.items() if name not in secrets}
    for part, label in zip(parts, part_labels(parts), strict=True) if not found else ():
        try:
            if part.reads_model:
                function: Part = ModelScore()
            elif part.kind == "verifier":
                function = build_rule(part, inherited, max_response_tokens)
            elif part.kind == "http":
                assert part.url is not None, "check_rewards asks for it"
                token = None if part.token_env is None else read_token(part.token_env, environment)
                function = RemoteReward(
                    f"reward part {label!r}", part.url, token, timeout_s=part.request_s, give_up_s=part.give_up_s
                )
            elif part.isolation is not None:
                assert part.entry_point is not None, "check_rewards asks for it"
                isolated = IsolatedFunction(part.entry_point, part.options, part.isolation, inherited)
                isolated.try_start()
                function = isolated
            else:
                assert part.entry_point is not None, "check_rewards asks for it"
                user = load_entry_point(part.entry_point, part.options)
                function = UserFunction(partial(user, **part.options) if part.options else user)
            summands.append(Summand(label, part.weight, function))
        except ConfigError as error:
            found.extend(error.problems)
    if found:
        raise ConfigError(found)
    return RewardSum(summands)


class RewardSum:
    """A part that fails or is not finite is an error, never a score."""

    def __init__(self, summands: Sequence[Summand]):
        self.summands = list(summands)

    @property
    def user_functions(self) -> list[str]:
        """Labels of user functions in this process, which native crashes would end."""
        return [summand.label for summand in self.summands if isinstance(summand.function, UserFunction)]

    @property
    def asks_services(self) -> bool:
        return any(summand.function.waits for summand in self.summands)

    def describe(self) -> list[str]:
        lines = ((summand.label, summand.function.about()) for summand in self.summands)
        return [f"reward {label}: {about}" for label, about in lines if about]

    def check(self, fields: Fields) -> None:
        """Raise `RewardError` if a row lacks a required column, or cannot be sent to a service or process."""
        for summand in self.summands:
            try:
                summand.function.check(fields)
            except RewardError as error:
                raise RewardError(f"reward part {summand.label!r}: {error}") from error

    def unusable(self, rows: Sequence[Fields], tell: Callable[[str], None] = print, *, every: bool = True) -> dict[int, str]:
        """Why rows cannot be scored, by row. `every`: also try rows that surely can."""
        found = dict[int, str]()
        for summand in self.summands:
            for place, reason in summand.function.unusable(rows, tell, every=every).items():
                found.setdefault(place, f"reward part {summand.label!r}: {reason}")
        return found

    def reads_model(self, labels: Collection[str] | None = None) -> bool:
        """True if one of the parts (None: of all) is the reward model's score."""
        models = [summand.label for summand in self.summands if isinstance(summand.function, ModelScore)]
        return any(labels is None or label in labels for label in models)

    def requested(self, seq_id: int) -> bool:
        """True if scores are requested and not yet taken by `evaluate`."""
        return all(summand.function.requested(seq_id) for summand in self.summands)

    def request(self, items: Sequence[ScoreItem], known: Collection[str] = ()) -> None:
        """Request scores, except `known` parts; returns at once and never asks twice."""
        for summand in self.summands:
            if summand.label not in known:
                summand.function.request(items)

    def forget(self, seq_id: int) -> None:
        for summand in self.summands:
            summand.function.forget(seq_id)

    def close(self) -> None:
        for summand in self.summands:
            summand.function.close()

    def score(self, prompt: str, response: str, fields: Fields, model_score: float | None, seq_id: int) -> float:
        return self.evaluate(prompt, response, fields, model_score, seq_id).total

    def evaluate(
        self, prompt: str, response: str, fields: Fields, model_score: float | None, seq_id: int, place: str = "",
        num_tokens: int | None = None, known: Mapping[str, float] = NOTHING_KNOWN,
    ) -> Reward:  # fmt: skip
        """`known` parts are taken as given."""
        item = ScoreItem(seq_id, prompt, response, fields)
        parts = self.parts(item, model_score, place, num_tokens, known=known)
        return Reward(_finite(self.total(parts), f"{_named(item, place)}: the weighted sum of {parts}"), parts)

    def total(self, parts: Mapping[str, float]) -> float:
        return sum(summand.weight * parts[summand.label] for summand in self.summands)

    def parts(
        self, item: ScoreItem, model_score: float | None, place: str = "", num_tokens: int | None = None, *,
        of: Collection[str] | None = None, known: Mapping[str, float] = NOTHING_KNOWN,
    ) -> dict[str, float]:  # fmt: skip
        """The parts `of` a response (None: all), by label. `num_tokens`: for `length`; `place`: file:line. Raises RewardError."""
        sequence, parts = _named(item, place), dict[str, float]()
        wanted = [summand for summand in self.summands if of is None or summand.label in of]
        asked = {summand.label for summand in wanted} - known.keys()
        self.request([item], {summand.label for summand in self.summands} - asked)
        try:
            for summand in wanted:
                part = summand.function
                if summand.label in known:
                    value: Any = known[summand.label]
                else:
                    value = model_score if isinstance(part, ModelScore) else _score(summand, item, sequence, num_tokens)
                parts[summand.label] = _finite(value, f"{sequence}: reward part {summand.label!r}")
        except RewardError:
            self.forget(item.seq_id)  # a reward service keeps running, and sequence names are reused
            raise
        return parts


def _score(summand: Summand, item: ScoreItem, sequence: str, num_tokens: int | None) -> Any:
    try:
        return summand.function.score(item, num_tokens)
    except RewardError as error:
        if summand.function.names_itself:
            raise
        raise RewardError(
            f"{sequence}: reward part {summand.label!r} failed: {error}; it must give a number for every response: correct the "
            "function, or the row's columns"
        ) from (error.__cause__ or error)


def _named(item: ScoreItem, place: str) -> str:
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
        raise RewardError(f"{what} gave {repr(value)[:SHOWN_CHARACTERS]} ({type(value).__name__}), not a number; {remedy}")
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
