"""A rank's current activity, and whether it waits for others: written by its main thread, read by its watchdog.

If the host blocks in every wait for a peer (gloo), the thread's stack shows whether the rank waits: it is then within a call
of torch.distributed, also one made by megatron-core or `torch.distributed.checkpoint`.  So a rank that hangs in a section
marked as a wait is not mistaken for one that waits.  NCCL's calls return at once, except barriers, so marks count, too.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch.distributed.distributed_c10d as c10d


@dataclass(frozen=True)
class Doing:
    """`waits`: the rank only waits for another.  `beats` grows with every action; `still_s`: seconds since it last grew."""

    what: str
    waits: bool
    beats: int
    still_s: float


class Activity:
    """Nested sections of work, and a count of beats.

    A beat costs an addition and a read of the clock; the description is made only on request.  `by_stack`: the stack alone
    shows whether the rank waits, because the host blocks in all messages (gloo).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, by_stack: bool = False) -> None:
        self._clock, self._beats, self._last, self.by_stack = clock, 0, clock(), by_stack
        self._thread = threading.get_ident()
        self._stack: list[tuple[object, bool]] = []

    def beat(self) -> None:
        """Count an action."""
        self._beats += 1
        self._last = self._clock()

    @contextmanager
    def doing(self, what: object, *, waits: bool = False) -> Iterator[None]:
        """A section of work, named `str(what)`.  If `what` is an `Activity`, this thread waits for that thread's work."""
        self._thread = threading.get_ident()
        self._stack.append((what, waits))
        self.beat()
        try:
            yield
        finally:
            self._stack.pop()
            self.beat()

    def now_at(self, what: object, waits: bool) -> None:
        """Rename the innermost section, and count an action."""
        self._stack[-1] = what, waits
        self.beat()

    def look(self) -> Doing:
        """The rank's activity, from the outermost section to the innermost.  For any thread."""
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


CALLS = c10d.__file__
SENDERS = "/torch/", "/megatron/core/", "/oppo_megatron/cluster/", "/oppo_megatron/engine/", "/oppo_megatron/mcore/"


def waits_in(thread: int) -> str | None:
    """The call in which a thread (`threading.get_ident`) waits for other ranks; None if it does something else.

    "": it waits for a call that was started earlier.
    """
    frames = list(_frames(sys._current_frames().get(thread)))
    calls = [frame.f_code.co_name for frame in frames if frame.f_code.co_filename == CALLS]
    if calls:
        return calls[-1]  # the one that was called: all_gather_object, say, not the all_gather within
    return "" if frames and _awaits_message(frames[0]) else None


def _awaits_message(innermost: FrameType) -> bool:
    """`Work.wait` is not a Python function: the innermost frame is its caller's, which is code that sends messages."""
    code = innermost.f_code
    return "wait" in code.co_names and any(folder in code.co_filename for folder in SENDERS)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back
