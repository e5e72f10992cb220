"""Rule `multiple_choice`: the first form of `_READERS` that names a letter decides; all its places must name the same letter."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from oppo_megatron.errors import RewardError
from oppo_megatron.rewards.rules.final_answer import bare, labelled, shown, texts

LETTERS = "ABCDEFGHIJ"
"""As many as MMLU-Pro has choices."""

_LETTER = r"[A-Ja-j]"
_UPPER = r"[A-J]"
_WHOLE = re.compile(rf"(?:(?i:option|choice|answer)\s+)?[\s*_$({{\[]*({_LETTER})[\s*_$)}}\].:]*")
# After a bare letter: no word that would make it an article or pronoun (`a dog`, `I think`).
_BARE = rf"({_LETTER})(?![A-Za-z0-9_]|['’][A-Za-z]|[ \t]+(?!(?:or|and|because|since|as|which)\b)[a-z])"
_MARKED = rf"[*_$\"'`]{{0,3}}(?:[(\[]\s?({_LETTER})\s?[)\]]|{_BARE})"
_STATED = re.compile(
    rf"(?:(?i:choice|option|letter)\s)?(?:\\(?:boxed|text(?:bf)?)\{{)?{_MARKED}"
    rf"(?:[*_$\"'`]{{0,3}}\s?(?:,|/|&|\bor\b|\band\b|或|和)\s?{_MARKED})?"
)
_LINE = re.compile(
    rf"(?:(?i:option|choice)\s)?(?:\(({_LETTER})\)|\[({_LETTER})\]|([A-J])(?:[.):](?=\s|\*|$)|\s[-–—]\s(?=[A-Za-z]{{2}}))|([A-J])(?=[\s*_]*$)).*"
)
_PICKED = re.compile(
    rf"(?<!that )(?<!if )(?<!If )(?<!then )\b(?:(?i:option|choice|answer)\s|选项)?\(?({_UPPER})\)?"
    r"(?:\sis\s(?:the\s)?(?:correct\b|(?:right|best)\s(?:answer|option|choice)\b)|\s?正确)"
    r"|\b(?i:(?:i|we)\s(?:would\s)?(?:choose|select|pick)|(?:so|thus|hence|therefore),?\sit(?:['’]s|\sis)|it\smust\sbe)"
    rf"\s(?:(?i:option|choice)\s)?\(?({_UPPER})\)?(?=[\s*_]*[.!]?\s*(?:\n|$))|(?<!不)选择?\s?\(?({_UPPER})\b"
)
_BRACKETS = re.compile(rf"[(\[]({_LETTER})[)\]]")


def choice(response: str) -> str | None:
    """The letter that a response states, in upper case, or None."""
    for form, letters in _READERS.items():
        places = _PLACES[form](response) if form in _PLACES else texts(response, [form])[1]
        found = {letter for text in places for letter in letters(text)}
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def verify(response: str, expected: Any) -> float:
    """1.0 for the expected letter, else 0.0. Raises as `expected_letter`."""
    return 1.0 if choice(response) == expected_letter(expected) else 0.0


def expected_letter(value: Any) -> str:
    """The letter in an answer column; an integer counts from 0, as in MMLU. Raises RewardError."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(LETTERS):
        return LETTERS[value]
    letter = _WHOLE.fullmatch(value) if isinstance(value, str) else None
    if letter is None:
        raise RewardError(
            f"the expected answer {value!r:.200} is not a choice; give a letter from A to {LETTERS[-1]}, or its number from 0"
        )
    return letter[1].upper()


def _marked(text: str) -> list[str | None]:
    text = bare(text)
    whole, label = _WHOLE.fullmatch(text), labelled(text)[0]
    letters = [whole[1].upper()] if whole else [label] if label else _in_line(text)
    return list(letters) or [letter for each in texts(text, ["stated"])[1] for letter in _stated(each)] or [None]


def _stated(text: str) -> list[str]:
    found = _STATED.match(text)
    return [letter.upper() for letter in found.groups() if letter] if found else []


def _in_line(text: str) -> list[str]:
    text = bare(text.lstrip("✅ "))
    found = _LINE.fullmatch(text)
    if not found:
        return []
    return [letter.upper() for letter in (*found.groups(), *_BRACKETS.findall(text)) if letter]


_PLACES: dict[str, Callable[[str], list[str]]] = {
    "picked": lambda response: [shown(response)],
    "any line": lambda response: shown(response).splitlines(),
}
_READERS: dict[str, Callable[[str], Sequence[str | None]]] = {
    "marked": _marked,
    "stated": _stated,
    "last line": _in_line,
    "picked": lambda text: [letter for found in _PICKED.findall(text) for letter in found if letter],
    "any line": _in_line,
}
