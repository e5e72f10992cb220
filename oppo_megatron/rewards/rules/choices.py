r"""Rule `multiple_choice`: a response states one letter, and it is the expected one.

The first of these forms that a response has anywhere decides.  All its places must state one and the same letter: who
names two has not answered.

    box         \boxed{B}, \boxed{\text{(B)}}                         the whole content is the letter
    statement   the answer is B, Answer: (B), the correct option is **B**
    last line   B    (B)    B.    B) Paris    **B**                   the last line that is not empty
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from oppo_megatron.errors import RewardError

LETTERS = "ABCDEFGHIJ"
"""As many as MMLU-Pro has choices."""

_LETTER = r"[A-Ja-j]"
_BOX = "\\boxed{"
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textrm)\s*\{(.*)\}", re.DOTALL)
_WHOLE = re.compile(rf"[\s*_$({{\[]*({_LETTER})[\s*_$)}}\].:]*")
# After a letter without brackets: no word that it could be the article or the pronoun of (`a dog`, `I think`).
_BARE = rf"({_LETTER})(?![\w'’]|[ \t]+(?!(?:or|and|because|since|as|which)\b)[a-z])"
_MARKED = rf"[*_$]{{0,3}}(?:[(\[]\s?({_LETTER})\s?[)\]]|{_BARE})"
_STATEMENT = re.compile(
    rf"(?i:\b(?:answer(?:\s(?:choice|option|letter))?|correct\s(?:choice|option|letter)))[*_]{{0,3}}\s?(?i:is\b\s?:?|:)"
    rf"[*_]{{0,3}}\s{{0,3}}(?i:(?:choice|option|letter)\s)?{_MARKED}"
    rf"(?:[*_$]{{0,3}}\s?(?:,|/|&|\bor\b|\band\b)\s?{_MARKED})?"
)
_LINE = re.compile(rf"[\s*_]*(?:\(({_LETTER})\)|\[({_LETTER})\]|([A-J])[.):](?=\s|\*|$)|([A-J])(?=[\s*_]*$)).*")
_BRACKETS = re.compile(rf"[(\[]({_LETTER})[)\]]")


def choice(response: str) -> str | None:
    """The letter that a response states, in upper case; None where it states none, or several."""
    for form in (_boxed, _stated, _in_last_line):
        found = set(form(response))
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def verify(response: str, expected: Any) -> float:
    """1.0 if the response states the expected letter, else 0.0.  Raises `RewardError` as `expected_letter`."""
    return 1.0 if choice(response) == expected_letter(expected) else 0.0


def settled(prefix: str) -> float | None:
    """0.0 once the boxes that are closed state two letters, or one states none: no more text takes that back."""
    found = set(_boxed(prefix))
    return 0.0 if len(found) > 1 or None in found else None


def expected_letter(value: Any) -> str:
    """The letter in a row's answer column; a whole number counts the choices from 0, as MMLU's does.

    Raises `RewardError` where it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(LETTERS):
        return LETTERS[value]
    letter = _WHOLE.fullmatch(value) if isinstance(value, str) else None
    if letter is None:
        raise RewardError(
            f"the expected answer {value!r} is no choice; give a letter from A to {LETTERS[-1]}, or its number from 0"
        )
    return letter[1].upper()


def _boxed(text: str) -> Iterator[str | None]:
    r"""The letter of each `\boxed{...}` that is closed; None of one with anything else in it."""
    start = text.find(_BOX)
    while start >= 0:
        end = _closing(text, start + len(_BOX))
        if end is None:
            return
        content = text[start + len(_BOX) : end].strip()
        wrapped = _WRAPPED.fullmatch(content)
        letter = _WHOLE.fullmatch(wrapped[1] if wrapped else content)
        yield letter[1].upper() if letter else None
        start = text.find(_BOX, end)


def _closing(text: str, begin: int) -> int | None:
    """Where the brace closes that was opened before `begin`."""
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None


def _stated(text: str) -> Iterator[str]:
    for found in _STATEMENT.finditer(text):
        yield from (letter.upper() for letter in found.groups() if letter)


def _in_last_line(text: str) -> Iterator[str]:
    """The letter that the line begins with, and those in brackets behind it."""
    lines = text.strip().splitlines()
    found = _LINE.fullmatch(lines[-1]) if lines else None
    if found:
        yield from (letter.upper() for letter in found.groups() if letter)
        yield from (letter.upper() for letter in _BRACKETS.findall(lines[-1]))
