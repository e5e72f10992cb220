"""Defer Ctrl-C while a command imports its modules.

Extension modules in C++ or Rust do not expect an exception from a signal handler during import: pydantic turns a
KeyboardInterrupt into a SchemaError, others drop it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

IMPORTING = "<frozen importlib._bootstrap>"
AGAIN_S = 0.05
MOST_S = 30.0
"""An import that takes longer is interrupted anyway."""


@contextmanager
def interrupts_behind_imports() -> Iterator[None]:
    """Defer a SIGINT during an import: KeyboardInterrupt is raised after it.

    Applies only if SIGINT has Python's own handler, and only in a process's main thread.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    interrupts = _Interrupts()
    before = signal.signal(signal.SIGINT, interrupts.hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        waits = interrupts.taken_back()
    if waits:
        raise KeyboardInterrupt


class _Interrupts:
    """The handler of one process: it sends an interrupt again until no import is in progress."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._next = 0.0
        self._again: threading.Timer | None = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now < self._next:
            return  # one is pending
        self._first = now if self._first is None else self._first
        if now - self._first > MOST_S or not _is_importing(frame):
            self._first = None
            raise KeyboardInterrupt
        self._next = now + AGAIN_S
        self._again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
        self._again.daemon = True
        self._again.start()

    def taken_back(self) -> bool:
        """Cancel a pending interrupt; return True if there was one.  One that is just being sent arrives within this call."""
        if self._again is None or not self._again.is_alive():
            return False
        self._again.cancel()
        self._again.join()
        return True


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            return True
        frame = frame.f_back
    return False
