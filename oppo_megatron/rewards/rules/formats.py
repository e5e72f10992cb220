"""Rules on form: `format`, a regular expression, and `length`, DAPO's length penalty."""

from __future__ import annotations

import re

import regex

MATCH_S = 1.0
"""Time limit per match; a response that takes longer does not match."""

_UNLITERAL = re.compile(r"\\[A-Za-z0-9]|(?<!\\)(?:\[(?:\\.|[^\]\\])*\]|\{[0-9,]*\}|\(\?[^)<]*[:!=]|\(\?P?<\w+>|[.^$*+?()|])")


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
