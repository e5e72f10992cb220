"""Rules that compare a response's final answer with the expected one, exactly.

    gsm8k        the last `#### n`, or a last line `A: n` (the form of the model solutions published with GSM8K)
    arithmetic   the same; without either, a last line that is a number or ends in `= n`
    flexible     gsm8k with `lenient`: the same; without either, the last number of all
    gsm8k_first  the first `#### n`, whatever follows its line

A number may be negative, decimal, a fraction, have thousands commas, a currency sign before and a full stop or a unit
after it. `1,200.0`, `$1200` and `2400/2` are equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from oppo_megatron.errors import RewardError

_NUMBER = re.compile(
    r"""\s*(?P<sign>[-+]?)\s*[$€£]?\s*(?P<inner>-?)
        (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))
        (?P<decimals>\.[0-9]+)?
        (?:\s*/\s*(?P<denominator>[0-9]+))?""",
    re.VERBOSE,
)
# After the number: nothing, or punctuation and words.  Another digit, an operator or a scale word would make it
# another number.
_AFTER = re.compile(
    r"(?!.*\b(?:hundred|thousand|million|billion|trillion)\b)(?:[^\w+*/=^][^0-9+*/=^]*)?", re.IGNORECASE
)
_MAX_CHARACTERS = 500  # a longer number is a runaway response; Python itself refuses to read very long ones
_MARK = re.compile(r"####(.*)")
_LAST_LINE = re.compile(r"\s*A:(.*)")


def parse_number(text: str) -> Fraction | None:
    """The number that `text` begins with; None if there is none, or more follows (`3+4`, `1 million`)."""
    found = _NUMBER.match(text.replace("\u2212", "-"))
    if found is None or not _AFTER.fullmatch(text[found.end() :].strip("\r\n")):
        return None
    if len(found[0]) > _MAX_CHARACTERS or (found["sign"] and found["inner"]):
        return None
    denominator = int(found["denominator"] or 1)
    if denominator == 0:
        return None
    value = Fraction((found["whole"].replace(",", "") or "0") + (found["decimals"] or "")) / denominator
    return -value if "-" in (found["sign"], found["inner"]) else value


def gsm8k_answer(text: str) -> Fraction | None:
    """The final answer of a GSM8K solution; None if it states none.  The last mark counts, number or not."""
    lines = text.strip().splitlines()
    last_line = _LAST_LINE.fullmatch(lines[-1]) if lines else None
    if last_line:
        return parse_number(last_line[1])
    marks = _MARK.findall(text)
    return parse_number(marks[-1].rpartition("####")[2]) if marks else None


def arithmetic_answer(text: str) -> Fraction | None:
    """The final answer of an arithmetic solution: marked as in GSM8K, else the last line's number after `=`."""
    lines = text.strip().splitlines()
    if not lines or "####" in text or _LAST_LINE.fullmatch(lines[-1]):
        return gsm8k_answer(text)
    return parse_number(lines[-1].rpartition("=")[2])


def flexible_answer(text: str) -> Fraction | None:
    """The final answer marked as in GSM8K; where nothing is marked, the last number in the text."""
    lines = text.strip().splitlines()
    if lines and ("####" in text or _LAST_LINE.fullmatch(lines[-1])):
        return gsm8k_answer(text)
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007  (the last one is wanted)
        pass
    if found is None:
        return None
    number = found[0].lstrip()
    before = text[: found.end() - len(number)]
    joined = before[-1:].isalnum() or (before.rstrip()[-1:].isdigit() and number[1:2].isspace())
    return parse_number(number.lstrip("+-") if joined else number)  # `7-5`, `7 - 5` and `GPT-4` have no sign


def first_answer(text: str) -> Fraction | None:
    """The answer in the first line with a mark, behind its first mark; None if that is no number, or there is no mark."""
    mark = _MARK.search(text)
    return parse_number(mark[1].partition("####")[0]) if mark else None


def first_settled(prefix: str, expected: Any) -> float | None:
    """The score by `first_answer` once the line of the first mark has ended; None before.  Raises as `expected_answer`."""
    mark = _MARK.search(prefix)
    return verify("gsm8k_first", prefix, expected) if mark and mark.end() < len(prefix) else None


ANSWER_OF: dict[str, Callable[[str], Fraction | None]] = {
    "gsm8k": gsm8k_answer,
    "arithmetic": arithmetic_answer,
    "flexible": flexible_answer,
    "gsm8k_first": first_answer,
}
"""The reader of each rule; `flexible` is that of gsm8k with `lenient`."""


def expected_answer(value: Any) -> Fraction:
    """The number in a row's answer column: a JSON number, a bare number as text, or a whole solution with its final
    answer.

    Raises `RewardError` if there is none: such a row can be scored neither right nor wrong.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return Fraction(str(value))
    if isinstance(value, str):
        number = gsm8k_answer(value)
        number = parse_number(value) if number is None else number
        if number is not None:
            return number
    raise RewardError(
        f"the expected answer {value!r} has no number; give a number, or a solution that ends in `#### n` or `A: n`"
    )


def verify(name: str, response: str, expected: Any) -> float:
    """1.0 if the response's final answer equals the expected one, else 0.0.  Raises `RewardError` as
    `expected_answer`.
    """
    return 1.0 if ANSWER_OF[name](response) == expected_answer(expected) else 0.0
