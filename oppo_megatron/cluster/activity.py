"""A rank's activity, and if it waits for others: the stack shows gloo's waits; NCCL's calls return at once, so its are marked."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed.distributed_c10d as c10d


@dataclass(frozen=True)
class Doing:
    what: str
    waits: bool  # the rank only waits for another
    beats: int  # grows with every action
    still_s: float  # seconds since it last grew


class Activity:
    """Nested sections of work. `by_stack`: only the stack shows waits (gloo)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, by_stack: bool = False) -> None:
        self._clock, self._beats, self._last, self.by_stack = clock, 0, clock(), by_stack
        self._thread = threading.get_ident()
        self._stack: list[tuple[object, bool]] = []

    def beat(self) -> None:
        self._beats += 1
        self._last = self._clock()

    @contextmanager
    def doing(self, what: object, *, waits: bool = False) -> Iterator[None]:
        """Enter a section; with an `Activity` as `what`, wait for that thread's work."""
        self._thread = threading.get_ident()
        self._stack.append((what, waits))
        self.beat()
        try:
            yield
        finally:
            self._stack.pop()
            self.beat()

    def now_at(self, what: object, waits: bool) -> None:
        self._stack[-1] = what, waits
        self.beat()

    def look(self) -> Doing:
        stack, beats, still_s = list(self._stack), self._beats, self._clock() - self._last
        words, (innermost, marked) = [str(each) for each, _ in stack], stack[-1] if stack else ("", False)
        if isinstance(innermost, Activity):
            theirs = innermost.look()
            return Doing(", ".join([*words[:-1], theirs.what]), theirs.waits, beats + theirs.beats, min(still_s, theirs.still_s))
        call = waits_in(self._thread)
        if call:
            words.append(f"in {call}")
        waits = call is not None or (marked and not self.by_stack)
        return Doing(", ".join(words) or "nothing that it has named", waits, beats, still_s)


CALLS = c10d.__file__
SENDERS = "/torch/", "/megatron/core/", "/oppo_megatron/cluster/", "/oppo_megatron/engine/", "/oppo_megatron/mcore/"


def waits_in(thread: int) -> str | None:
    """Name of torch's call that keeps a thread waiting for other ranks ("": one started earlier), or None."""
    innermost = frame = sys._current_frames().get(thread)
    call = None
    while frame is not None:
        if frame.f_code.co_filename == CALLS:
            call = frame.f_code.co_name  # at last the outermost: all_gather_object, say, not the all_gather within
        frame = frame.f_back
    if call is not None or innermost is None:
        return call
    # `Work.wait` is not a Python function: the innermost frame is its caller's, which is code that sends messages.
    code = innermost.f_code
    return "" if "wait" in code.co_names and any(folder in code.co_filename for folder in SENDERS) else None
