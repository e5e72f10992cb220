"""Rule `format`: 1.0 if a regular expression matches the response, else 0.0.

The engine is `regex`, which ends a match that takes too long, and supports partial matches.
"""

from __future__ import annotations

import re

from oppo_megatron.config.data import compile_pattern

MATCH_S = 1.0
"""Time limit of one match; a response on which the pattern takes longer does not match."""

# Parts of patterns whose match in a prefix is the same whatever follows.  All else (what looks around, anchors, references
# to groups, possessive repeats, flags, recursion) keeps a prefix from being settled.
_PLAIN = re.compile(
    r"""(?: \\[dDwWsSnrt.^$*+?()\[\]{}|/\\<>\-]
          | \[ \^? (?: \\[dDwWsSnrt.^$*+?()\[\]{}|/\\<>\-] | [^\\\[\]] )+ \]
          | \( (?: \?: | \?P<\w+> | (?![?*]) )
          | [)|.]
          | [^\\\[\]()|.^$*+?{}]
          | (?:[*+?]|\{[0-9]+(?:,[0-9]*)?\}) \?? (?![+*?{])
        )*""",
    re.VERBOSE | re.DOTALL,
)


_UNLITERAL = re.compile(r"\\[A-Za-z0-9]|(?<!\\)(?:\[(?:\\.|[^\]\\])*\]|\{[0-9,]*\}|\(\?[^)<]*[:!=]|\(\?P?<\w+>|[.^$*+?()|])")


def literals(pattern: str) -> list[str]:
    """The stretches of plain text in a pattern, in order, without white space around them."""
    runs = (re.sub(r"\\(.)", r"\1", run).strip() for run in _UNLITERAL.split(pattern))
    return [run for run in runs if run]


class FormatRule:
    """`pattern` on a whole response (`whole`), or on any stretch of it.  `can_settle`: `settled` can return more than None."""

    def __init__(self, pattern: str, *, whole: bool):
        self._pattern, self._whole = compile_pattern(pattern), whole
        # A whole match covers the text from its beginning to its end, whatever `^` and `$` around the pattern say.
        plain = pattern.removeprefix("^").removesuffix("$") if whole else pattern
        self.can_settle = bool(_PLAIN.fullmatch(plain))

    def score(self, response: str) -> float:
        match = self._pattern.fullmatch if self._whole else self._pattern.search
        try:
            return 1.0 if match(response, timeout=MATCH_S) else 0.0
        except TimeoutError:
            return 0.0

    def settled(self, prefix: str) -> float | None:
        """0.0 once no continuation of the prefix can match as a whole; 1.0 once a stretch of it matches."""
        if not self.can_settle:
            return None
        try:
            if self._whole:
                return None if self._pattern.fullmatch(prefix, partial=True, timeout=MATCH_S) else 0.0
            return 1.0 if self._pattern.search(prefix, timeout=MATCH_S) else None
        except TimeoutError:
            return None
