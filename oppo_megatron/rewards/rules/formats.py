"""Rule `format`: 1.0 if a regular expression matches the response, else 0.0.

The engine is `regex`, which ends a match that takes too long.
"""

from __future__ import annotations

import re

from oppo_megatron.config.data import compile_pattern

MATCH_S = 1.0
"""Time limit of one match; a response on which the pattern takes longer does not match."""

_UNLITERAL = re.compile(r"\\[A-Za-z0-9]|(?<!\\)(?:\[(?:\\.|[^\]\\])*\]|\{[0-9,]*\}|\(\?[^)<]*[:!=]|\(\?P?<\w+>|[.^$*+?()|])")


def literals(pattern: str) -> list[str]:
    """The stretches of plain text in a pattern, in order, without white space around them."""
    runs = (re.sub(r"\\(.)", r"\1", run).strip() for run in _UNLITERAL.split(pattern))
    return [run for run in runs if run]


class FormatRule:
    """`pattern` on a whole response (`whole`), or on any stretch of it.  Raises ValueError for an invalid pattern."""

    def __init__(self, pattern: str, *, whole: bool):
        self._pattern, self._whole = compile_pattern(pattern), whole

    def score(self, response: str) -> float:
        match = self._pattern.fullmatch if self._whole else self._pattern.search
        try:
            return 1.0 if match(response, timeout=MATCH_S) else 0.0
        except TimeoutError:
            return 0.0

