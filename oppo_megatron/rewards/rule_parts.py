from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from oppo_megatron.config.rewards import Limits, RewardPart, compile_pattern
from oppo_megatron.errors import ConfigError, RewardError
from oppo_megatron.records import field_at, field_names, nearest_field
from oppo_megatron.rewards.isolated_rule import IsolatedRule, Trial
from oppo_megatron.rewards.isolation import IsolatedFunction
from oppo_megatron.rewards.parts import Fields, Part, RulePart
from oppo_megatron.rewards.rules import choices, code_tests, math_answers
from oppo_megatron.rewards.verifiers import expected_answer, format_score, length_score, verify

VERLS_ANSWER = "reward_model.ground_truth"
"""Expected answer in verl's layout, used without a column `answer`."""
END_S = 10.0
"""Time for rule `code`'s process to start and end the tests, in addition to the tests' own."""
OWN_MB = 2048
"""Least address space of that process itself."""


def column(fields: Fields, answer: str) -> Any:
    """The column `answer`, or verl's. Raises `RewardError` if missing."""
    for name in (answer, *([VERLS_ANSWER] if answer == "answer" else [])):
        with suppress(KeyError):
            return field_at(fields, name)
    names = list(field_names(fields))
    near = nearest_field([answer, "ground_truth"], names)
    named = f", the nearest is `answer: {near}`" if near else ""
    raise RewardError(
        f"the row has no column {answer!r} with the expected answer (it has: {', '.join(names) or 'none'}); name the column "
        f"in the verifier's `answer`{named}"
    )


def build_rule(part: RewardPart, environment: Mapping[str, str], max_response_tokens: int | None) -> Part:
    """Processes inherit `environment`. Raises ConfigError."""
    assert part.name is not None, "check_rewards asks for it"
    if part.name == "format":
        assert part.pattern is not None, "check_rewards asks for it"
        pattern = compile_pattern(part.pattern)
        return RulePart(lambda item, _: format_score(item.response, pattern, whole=not part.lenient))
    if part.name == "length":
        return RulePart(_length_rule(part, max_response_tokens))
    if part.isolation is not None:
        return _isolated_rule(part, part.isolation, environment)
    score: Callable[[str, Any], float] = partial(verify, "flexible" if part.lenient else part.name)
    expected: Callable[[Any], Any] = expected_answer
    if part.name == "multiple_choice":
        score, expected = choices.verify, choices.expected_letter
    return RulePart(
        lambda item, _: score(item.response, column(item.fields, part.answer)),
        lambda fields: expected(column(fields, part.answer)),
    )


def _length_rule(part: RewardPart, max_response_tokens: int | None) -> Callable[[Any, int | None], float]:
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

    def rate(item: Any, num_tokens: int | None) -> float:
        assert num_tokens is not None, "the caller of a rule `length` counts the tokens"
        return length_score(num_tokens, most, buffer)

    return rate


def _isolated_rule(part: RewardPart, limits: Limits, environment: Mapping[str, str]) -> IsolatedRule:
    if part.name == "math":
        math_answers.require_library()

        def expected(fields: Fields) -> dict[str, Any]:
            return {math_answers.ANSWER: math_answers.expected_text(column(fields, part.answer))}

        trial = Trial(math_answers.PROBE, math_answers.needs_library)
        return IsolatedRule(lambda: IsolatedFunction(math_answers.ENTRY_POINT, {}, limits, environment), expected, trial=trial)

    options = {"wall_s": limits.wall_s, "memory_mb": limits.memory_mb, "partial_credit": part.lenient}
    outer = Limits(wall_s=limits.wall_s + END_S, memory_mb=max(limits.memory_mb, OWN_MB))

    def tests(fields: Fields) -> dict[str, Any]:
        return {code_tests.TESTS: code_tests.read_tests(column(fields, part.answer))}

    return IsolatedRule(
        lambda: IsolatedFunction(code_tests.ENTRY_POINT, options, outer, environment), tests, code_tests.about_network
    )
