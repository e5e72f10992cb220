"""Texts that tokens complete, wherever the tokens' borders lie: the tokens at which one may end, and the ends of steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Decode = Callable[[Sequence[int]], str]
"""The text of token ids; special tokens have none."""

INCOMPLETE = "\ufffd"  # what bytes of a character stand for until the last has come


class Completing:
    """Tells of a token whether one of `strings` may end with it, by the token alone; remembers what it was asked."""

    def __init__(self, strings: Collection[str], decode: Decode):
        self._last, self._decode = frozenset(string[-1] for string in strings), decode
        self._known: dict[int, bool] = {}

    def __contains__(self, token: int) -> bool:
        """True if a string's last character can come from this token; a token's text alone may lack its leading space."""
        if token not in self._known:
            text = self._decode([token])
            self._known[token] = (
                INCOMPLETE in text or " " in self._last or any(last in text for last in self._last)
            )
        return self._known[token]


class StepEnds:
    """Finds the steps of a response: a step ends with the token whose text completes the `separator`.

    The separator may lie within a token, end in the midst of one, or span several.  One with nothing but white space since
    the step before ends none, so that a blank line is the same as one token and as two.  A token ends one step at most.  What
    is left at the end of the response is a step too, and ends with the last token: EOS, or the last one before the cut.  A
    response has one step at least.

    This is a function of the response's token ids.  A process reward model's labels are put at these tokens when it is
    trained, and its scores are read there when it serves.
    """

    def __init__(self, separator: str, decode: Decode):
        assert separator
        self.separator, self._decode = separator, decode
        self._completing = Completing([separator], decode)

    def of(self, response: Sequence[int]) -> list[int]:
        """The last token of each step, by its place in the response, ascending."""
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
        """The text between the last end and `stop`, `rest` before it."""
        if not ends:
            return self._decode(response[:stop])
        # Decoded after the token of the last end: alone, its first token may lack its leading space.
        begin = ends[-1]
        seen = len(self._decode(response[begin : begin + 1]))
        return rest + self._decode(response[begin:stop])[seen:]
