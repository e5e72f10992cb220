"""The scorer's client as the actor sees it: fed by the one rank of a replica that sees tokens while they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from oppo_megatron.rewards.streaming import ScorerStream


class Feed:
    """Offers rows to `stream`, if this rank has one, and takes their scores.

    An error is kept until scores are taken, when all ranks learn of it (`StreamedRewards`): a rank that raised it in the
    middle of a generation would leave the others of its model waiting there.

    Only the last offer of a row counts: a row that ended while it was drawn, but differs in the end because
    the model's own `infer` has chosen or cut it, gets another name.
    """

    def __init__(self, stream: ScorerStream | None):
        self._stream = stream
        self._failure: Exception | None = None
        self._names: dict[int, int] = {}  # names of rows in the stream, if they differ from the rows' own
        self._others = count(-1, -1)

    @property
    def is_open(self) -> bool:
        """True if rows that are offered here are scored."""
        return self._stream is not None and self._failure is None

    def offer(self, key: int, tokens: Sequence[int], final: bool) -> None:
        """The row is `tokens` by now; `final`: it is whole."""
        if self._stream is None or self._failure is not None:
            return
        try:
            if not self._stream.offer(self._name(key), tokens, final):
                self._stream.forget([self._name(key)])
                self._names[key] = next(self._others)
                self._stream.offer(self._name(key), tokens, final)
        except Exception as error:
            self._failure = error

    def take(self, keys: Sequence[int]) -> list[float]:
        """The scores of whole rows, waited for; zeros on the other ranks, and after an error."""
        if self._stream is None or self._failure is not None:
            return [0.0] * len(keys)
        try:
            return [self._stream.result(self._names.pop(key, key)) for key in keys]
        except Exception as error:
            self._failure = error
            return [0.0] * len(keys)

    def forget(self, keys: Sequence[int]) -> None:
        """Rows that nobody will ask for."""
        if self._stream is not None:
            self._stream.forget([self._names.pop(key, key) for key in keys])

    def _name(self, key: int) -> int:
        return self._names.get(key, key)

    def give_failure(self) -> Exception | None:
        """Return the error, once."""
        failure, self._failure = self._failure, None
        return failure
