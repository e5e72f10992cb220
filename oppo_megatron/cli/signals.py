"""Signals that the starting process gets, passed on to the ranks that it has started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from oppo_megatron.errors import EXIT_REQUEUE

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)


class SignalRelay:
    """Tells the ranks to save the run and to end (SIGUSR1); a second SIGTERM ends them at once.

    Where a signal was sent to the whole process group, the ranks have had it already: SIGUSR1 asks for nothing twice.
    `code` is what a run ends with whose ranks were told, and could not save: 75 (start it again), else 0.
    """

    def __init__(self) -> None:
        self.code = 0
        self._terms = 0
        self._told_at: float | None = None

    def told_s(self) -> float | None:
        """Seconds since the ranks were first told; None where they were not."""
        return None if self._told_at is None else time.monotonic() - self._told_at

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Pass signals on in the block; only a process's main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._hear) for number in PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.code = EXIT_REQUEUE
        if self._told_at is None:
            self._told_at = time.monotonic()
        self._terms += number == signal.SIGTERM
        for rank in multiprocessing.active_children():
            if self._terms > 1:
                rank.kill()
            elif rank.pid is not None:
                os.kill(rank.pid, signal.SIGUSR1)
        if self._terms > 1:
            os._exit(128 + number)
