"""Rules on form: `format`, a regular expression, and `length`, DAPO's length penalty."""

from __future__ import annotations

import re
from dataclasses import dataclass

from oppo_megatron.config.rewards import compile_pattern

MATCH_S = 1.0
"""Time limit per match; a response that takes longer does not match."""

_UNLITERAL = re.compile(r"\\[A-Za-z0-9]|(?<!\\)(?:\[(?:\\.|[^\]\\])*\]|\{[0-9,]*\}|\(\?[^)<]*[:!=]|\(\?P?<\w+>|[.^$*+?()|])")


def literals(pattern: str) -> list[str]:
    runs = (re.sub(r"\\(.)", r"\1", run).strip() for run in _UNLITERAL.split(pattern))
    return [run for run in runs if run]


class FormatRule:
    """1.0 if `pattern` matches all of a response (`whole`) or a part, else 0.0, within a time limit.

    Raises ValueError for an invalid pattern.
    """

    def __init__(self, pattern: str, *, whole: bool):
        self._pattern, self._whole = compile_pattern(pattern), whole

    def score(self, response: str) -> float:
        match = self._pattern.fullmatch if self._whole else self._pattern.search
        try:
            return 1.0 if match(response, timeout=MATCH_S) else 0.0
        except TimeoutError:
            return 0.0


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13).

    0 up to max - buffer tokens, linearly down to -1 at `max_tokens`, and -1 beyond.
    """

    max_tokens: int
    buffer_tokens: int

    def score(self, num_tokens: int) -> float:
        over = num_tokens - (self.max_tokens - self.buffer_tokens)
        return -min(max(over, 0) / self.buffer_tokens, 1.0)
