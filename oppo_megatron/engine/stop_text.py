"""Responses that end with a text.

A response ends with the first token at which its decoded text contains one of the strings, wherever the tokens' borders lie:
the string may begin within a token, span several, and be followed by more text within the last.  This depends on the
response's tokens alone, not on the layout, nor on how many tokens are examined together.
"""

from __future__ import annotations

from collections.abc import Sequence

from oppo_megatron.token_text import Completing, Decode

EDGE_CHARACTERS = 8
"""So many characters of a part's text may differ from those of the whole: a space that begins it, half a character."""
FIRST_TOKENS = 16


class StopText:
    """Tells whether a response has come to one of `strings`."""

    def __init__(self, strings: Sequence[str], decode: Decode):
        assert strings and all(strings)
        self.strings, self._decode = tuple(strings), decode
        self._longest = max(map(len, strings))
        self._completing = Completing(strings, decode)

    def ends(self, response: Sequence[int]) -> bool:
        """Whether the last token is the one that the response ends with; the tokens before it have not ended it."""
        if response[-1] not in self._completing:
            return False
        size = FIRST_TOKENS + self._longest
        while size < len(response):
            text = self._decode(response[-size:])
            within = text[EDGE_CHARACTERS:]
            if self._in(within):
                return True
            if len(within) >= self._longest and not self._in(text):
                return False
            size *= 2
        return self._in(self._decode(response))

    def _in(self, text: str) -> bool:
        return any(string in text for string in self.strings)
