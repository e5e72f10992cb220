"""Rules that compare a response's final answer with the expected number, exactly (docs/rewards.md).

gsm8k: the last `#### n`, or a last line `A: n`.  arithmetic: else the last line's number.  flexible (gsm8k with `lenient`): else
the last number.  gsm8k_first: the first `#### n`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from oppo_megatron.errors import RewardError
from oppo_megatron.rewards.rules.final_answer import shown, texts
from oppo_megatron.rewards.rules.numbers import MAX_CHARACTERS, parse_number

_MARK = re.compile(r"####(.*)")
_DIGITS = re.compile(
    r"[-+]?\s{0,3}[$€£]?\s{0,3}-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]*\.?[0-9]+)(?:\s*/\s*[0-9]+)?"
)


def gsm8k_answer(text: str) -> Fraction | None:
    """A GSM8K solution's final answer, or None.  The last mark counts, number or not."""
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
    """The number in an answer column: JSON number, text or whole solution.  Raises RewardError."""
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
    """1.0 if the answers are equal, else 0.0.  Raises as `expected_answer`."""
    return 1.0 if ANSWER_OF[name](response) == expected_answer(expected) else 0.0
