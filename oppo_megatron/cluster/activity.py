"""A rank's current activity, and whether it waits for others: kept by its main thread, read by its watchdog.

If the host blocks in every wait for a peer, the thread's stack tells whether the rank waits: a rank that hangs by itself in a
stretch marked as a wait is then not mistaken for one that waits.  Otherwise marks count, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from oppo_megatron.cluster.blocking import waits_in


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

    A beat is an addition and a look at the clock; the activity is put into words only on request.  `by_stack`: the
    stack alone tells whether the rank waits, for all its messages are such that the host blocks in them (gloo's).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, by_stack: bool = False) -> None:
        self._clock, self._beats, self._last, self.by_stack = clock, 0, clock(), by_stack
        self._thread = threading.get_ident()
        self._stack: list[tuple[object, bool]] = []

    def beat(self) -> None:
        """Something has been done."""
        self._beats += 1
        self._last = self._clock()

    @contextmanager
    def doing(self, what: object, *, waits: bool = False) -> Iterator[None]:
        """A stretch of work; `str(what)` names it.  An `Activity`: what its thread does, for which this one waits."""
        self._thread = threading.get_ident()
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
        stack, beats, last = list(self._stack), self._beats, self._last
        words, marked = [str(each) for each, _ in stack], bool(stack) and stack[-1][1]
        if stack and isinstance(other := stack[-1][0], Activity):
            theirs = other.look()
            what = ", ".join([*words[:-1], theirs.what])
            return Doing(what, theirs.waits, beats + theirs.beats, min(self._clock() - last, theirs.still_s))
        call = waits_in(self._thread)
        if call:
            words.append(f"in {call}")
        waits = call is not None or (marked and not self.by_stack)
        return Doing(", ".join(words) or "nothing that it has named", waits, beats, self._clock() - last)
