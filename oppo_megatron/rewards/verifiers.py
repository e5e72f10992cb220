"""Rules that compare a final answer with the expected number, exactly, and rules of form and length.

gsm8k: the last `#### n`, or a last line `A: n`; gsm8k_first: the first.  arithmetic: else the last line's number.
flexible (gsm8k with `lenient`): else the last number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import regex

from oppo_megatron.errors import RewardError
from oppo_megatron.rewards.rules.final_answer import shown, texts
from oppo_megatron.rewards.rules.numbers import MAX_CHARACTERS, parse_number

MATCH_S = 1.0
"""Time limit per match; a response that takes longer does not match."""

_UNLITERAL = re.compile(r"\\[A-Za-z0-9]|(?<!\\)(?:\[(?:\\.|[^\]\\])*\]|\{[0-9,]*\}|\(\?[^)<]*[:!=]|\(\?P?<\w+>|[.^$*+?()|])")
_MARK = re.compile(r"####(.*)")
_DIGITS = re.compile(
    r"[-+]?\s{0,3}[$€£]?\s{0,3}-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]*\.?[0-9]+)(?:\s*/\s*[0-9]+)?"
)


def gsm8k_answer(text: str) -> Fraction | None:
    """The last mark counts, number or not."""
    return _read(text, ["hashed"])


def flexible_answer(text: str) -> Fraction | None:
    """The answer in any form, else the last number."""
    form, found = texts(text, ["hashed", "marked", "stated"])
    number = _number(found[-1]) if found else None
    if number is not None or form == "hashed":
        return number
    text, last = shown(text), None
    for last in _DIGITS.finditer(text):  # noqa: B007  (the last one is wanted)
        pass
    if last is None or len(last[0]) > MAX_CHARACTERS:
        return None
    number_text, before = last[0].lstrip(), text[: last.end() - len(last[0].lstrip())]
    joined = before[-1:].isalnum() or (before.rstrip()[-1:].isdigit() and number_text[1:2].isspace())
    return parse_number(number_text.lstrip("+-") if joined else number_text)  # `7-5`, `7 - 5` and `GPT-4` have no sign


def _read(text: str, forms: Sequence[str]) -> Fraction | None:
    form, found = texts(text, forms)
    return _number(found[-1].rpartition("=")[2] if form == "last line" else found[-1]) if found else None


def _number(text: str) -> Fraction | None:
    number = parse_number(text)
    found = texts(text, ["marked", "stated"])[1] if number is None else []
    return parse_number(found[-1]) if found else number


ANSWER_OF: dict[str, Callable[[str], Fraction | None]] = {
    "gsm8k": gsm8k_answer,
    "arithmetic": lambda text: _read(text, ["hashed", "last line"]),
    "flexible": flexible_answer,
    "gsm8k_first": lambda text: _number(mark[1].partition("####")[0]) if (mark := _MARK.search(text)) else None,
}
"""Answer reader of each rule; `flexible` is gsm8k with `lenient`."""


def expected_answer(value: Any) -> Fraction:
    """The number in a JSON number, text or whole solution. Raises RewardError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    if isinstance(value, float) and math.isfinite(value):
        return Fraction(str(value))
    if isinstance(value, str):
        number = gsm8k_answer(value)
        number = parse_number(value) if number is None else number
        if number is not None:
            return number
    raise RewardError(
        f"the expected answer {value!r:.200} has no number; give a number, or a solution that ends in `#### n` or `A: n`"
    )


def verify(name: str, response: str, expected: Any) -> float:
    """1.0 if the answers are equal, else 0.0. Raises as `expected_answer`."""
    return 1.0 if ANSWER_OF[name](response) == expected_answer(expected) else 0.0


def literals(pattern: str) -> list[str]:
    runs = (re.sub(r"\\(.)", r"\1", run).strip() for run in _UNLITERAL.split(pattern))
    return [run for run in runs if run]


def format_score(response: str, pattern: regex.Pattern[str], whole: bool) -> float:
    """1.0 if `pattern` matches all of a response (`whole`) or a part, else 0.0, within a time limit."""
    match = pattern.fullmatch if whole else pattern.search
    try:
        return 1.0 if match(response, timeout=MATCH_S) else 0.0
    except TimeoutError:
        return 0.0


def length_score(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13): over the last `buffer_tokens`, from 0 down to -1."""
    over = num_tokens - (max_tokens - buffer_tokens)
    return -min(max(over, 0) / buffer_tokens, 1.0)
