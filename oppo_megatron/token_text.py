"""Find stop texts and steps in tokens, regardless of token borders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Decode = Callable[[Sequence[int]], str]
"""The text of token ids; special tokens have none."""

INCOMPLETE = "\ufffd"  # what bytes of a character stand for until the last has come


class Completing:
    """Tokens that may end one of `strings`."""

    def __init__(self, strings: Collection[str], decode: Decode):
        self._last, self._decode = frozenset(string[-1] for string in strings), decode
        self._known: dict[int, bool] = {}

    def __contains__(self, token: int) -> bool:
        """True if a string's last character may come from the token."""
        if token not in self._known:
            text = self._decode([token])
            self._known[token] = INCOMPLETE in text or " " in self._last or any(last in text for last in self._last)
        return self._known[token]


class StepEnds:
    """A response's steps, ended by the token that completes `separator`; one per token, white-space steps not counted."""

    def __init__(self, separator: str, decode: Decode):
        assert separator
        self.separator, self._decode = separator, decode
        self._completing = Completing([separator], decode)

    def of(self, response: Sequence[int]) -> list[int]:
        """Index of each step's last token."""
        assert len(response), "a response has one token at least"
        ends: list[int] = []
        rest = ""  # the text after the separator in the token of the last end
        for place, token in enumerate(response):
            if token not in self._completing:
                continue
            *steps, after = self._text(response, ends, rest, place + 1).split(self.separator)
            if any(step.strip() for step in steps):
                ends.append(place)
                rest = after
        last = len(response) - 1
        if not ends or ends[-1] < last:
            left = self._text(response, ends, rest, len(response)).replace(self.separator, "")
            if left.strip() or not ends:
                ends.append(last)
        return ends

    def _text(self, response: Sequence[int], ends: Sequence[int], rest: str, stop: int) -> str:
        if not ends:
            return self._decode(response[:stop])
        # Decoded after the token of the last end: alone, its first token may lack its leading space.
        begin = ends[-1]
        seen = len(self._decode(response[begin : begin + 1]))
        return rest + self._decode(response[begin:stop])[seen:]
