"""What a rank does at the moment, and for whom it waits: kept by its main thread, read by its watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Doing:
    """`waits`: the rank does nothing itself, and goes on when another comes.

    `beats` grows with everything that is done; `still_s`: seconds since it last grew.
    """

    what: str
    waits: bool
    beats: int
    still_s: float


class Activity:
    """Nested stretches of work, and a count of beats.

    A beat is an addition and a look at the clock; what is done is put into words only where it is asked for.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._beats, self._last = clock, 0, clock()
        self._stack: list[tuple[object, bool]] = []

    def beat(self) -> None:
        """Something has been done."""
        self._beats += 1
        self._last = self._clock()

    @contextmanager
    def doing(self, what: object, *, waits: bool = False) -> Iterator[None]:
        """A stretch of work; `str(what)` names it."""
        self._stack.append((what, waits))
        self.beat()
        try:
            yield
        finally:
            self._stack.pop()
            self.beat()

    def now_at(self, what: object, waits: bool) -> None:
        """Within the innermost stretch the rank has come to this."""
        self._stack[-1] = what, waits
        self.beat()

    def look(self) -> Doing:
        """What the rank does, from the widest stretch to the innermost.  For any thread."""
        stack = list(self._stack)
        what = ", ".join(str(each) for each, _ in stack) or "nothing that it has named"
        return Doing(what, bool(stack) and stack[-1][1], self._beats, self._clock() - self._last)
