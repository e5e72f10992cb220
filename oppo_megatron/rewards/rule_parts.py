"""The rules of kind verifier as parts of a reward: which column a rule reads, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from oppo_megatron.config.data import RewardPart
from oppo_megatron.config.remote import IsolationConfig
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.records import field_at, field_names, nearest_field
from oppo_megatron.rewards.isolated_rule import IsolatedRule, Trial
from oppo_megatron.rewards.isolation import IsolatedFunction
from oppo_megatron.rewards.rules import choices, code_tests, math_answers
from oppo_megatron.rewards.rules.formats import FormatRule
from oppo_megatron.rewards.rules.lengths import LengthRule
from oppo_megatron.rewards.verifiers import expected_answer, verify

VERLS_ANSWER = "reward_model.ground_truth"
"""The expected answer in rows of verl's layout, if they have no column `answer`."""
END_S = 10.0
"""Time that the process of rule `code` has to start and end the tests, in addition to the tests' own time."""
OWN_MB = 2048
"""The least address space of that process itself."""


@dataclass(frozen=True, slots=True)
class VerifierReward:
    """1.0 or 0.0 by `verify`, against column `answer`, which `expected` reads."""

    verify: Callable[[str, Any], float]
    expected: Callable[[Any], Any]
    answer: str

    def __call__(self, prompt: str, response: str, fields: Mapping[str, Any]) -> float:
        return self.verify(response, column(fields, self.answer))

    def check(self, fields: Mapping[str, Any]) -> None:
        """Raise `RewardError` if a response to this row could not be scored."""
        self.expected(column(fields, self.answer))

@dataclass(frozen=True, slots=True)
class FormatReward:
    rule: FormatRule

    def __call__(self, prompt: str, response: str, fields: Mapping[str, Any]) -> float:
        return self.rule.score(response)

Rule = VerifierReward | FormatReward | LengthRule | IsolatedRule


def column(fields: Mapping[str, Any], answer: str) -> Any:
    """Return the row's column `answer`, or verl's in its place.  Raises `RewardError` if it is not there."""
    for name in (answer, *([VERLS_ANSWER] if answer == "answer" else [])):
        with suppress(KeyError):
            return field_at(fields, name)
    names = list(field_names(fields))
    near = nearest_field([answer, "ground_truth"], names)
    named = f", the nearest is `answer: {near}`" if near else ""
    raise RewardError(
        f"the row has no column {answer!r} with the expected answer (it has: {', '.join(names) or 'none'}); name the column "
        f"as `answer` beside the verifier{named}"
    )


def build_rule(part: RewardPart, environment: Mapping[str, str], max_response_tokens: int | None) -> Rule:
    """The rule that a part of kind verifier names.  Raises `ConfigError` if it cannot be had.

    `environment` is inherited by its processes; `max_response_tokens`: the longest response, where that is known.
    """
    if part.name == "format":
        assert part.pattern is not None, "check_rewards asks for it"
        return FormatReward(FormatRule(part.pattern, whole=not part.lenient))
    if part.name == "length":
        return _length_rule(part, max_response_tokens)
    if part.isolation is not None:
        return _isolated_rule(part, part.isolation, environment)
    if part.name == "multiple_choice":
        return VerifierReward(choices.verify, choices.expected_letter, part.answer)
    assert part.name is not None, "check_rewards asks for it"
    name = "flexible" if part.lenient else part.name
    return VerifierReward(partial(verify, name), expected_answer, part.answer)


def _length_rule(part: RewardPart, max_response_tokens: int | None) -> LengthRule:
    most, buffer = part.max_tokens or max_response_tokens, part.buffer_tokens
    assert buffer is not None, "check_rewards asks for it"
    if most is None:
        raise ConfigError("rule length needs the longest response, which is not known here; add `max_tokens`")
    if buffer > most:
        raise ConfigError(f"buffer_tokens {buffer} of rule length is above its max_tokens {most}; lower it")
    if max_response_tokens is not None and most - buffer >= max_response_tokens:
        raise ConfigError(
            f"rule length begins at {most - buffer} tokens (max_tokens {most}, less buffer_tokens {buffer}), but no response has "
            f"more than rollout.max_response_tokens {max_response_tokens}; lower max_tokens, or leave it out"
        )
    return LengthRule(most, buffer)


def _isolated_rule(part: RewardPart, limits: IsolationConfig, environment: Mapping[str, str]) -> IsolatedRule:
    if part.name == "math":
        math_answers.require_library()

        def ask_math() -> IsolatedFunction:
            return IsolatedFunction(math_answers.ENTRY_POINT, {}, limits, environment)

        def expected(fields: Mapping[str, Any]) -> dict[str, Any]:
            return {math_answers.ANSWER: math_answers.expected_text(column(fields, part.answer))}

        trial = Trial(math_answers.PROBE, math_answers.needs_library)
        return IsolatedRule(ask_math, expected, part.processes, trial=trial)

    options = {"wall_s": limits.wall_s, "memory_mb": limits.memory_mb, "partial_credit": part.lenient}
    outer = IsolationConfig(wall_s=limits.wall_s + END_S, memory_mb=max(limits.memory_mb, OWN_MB))

    def ask_code() -> IsolatedFunction:
        return IsolatedFunction(code_tests.ENTRY_POINT, options, outer, environment)

    def tests(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {code_tests.TESTS: code_tests.read_tests(column(fields, part.answer))}

    return IsolatedRule(ask_code, tests, part.processes, code_tests.about_network)
