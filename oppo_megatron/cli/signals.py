"""Passes the starting process's signals on to its child processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from types import FrameType
from typing import NoReturn

import psutil

from oppo_megatron.cluster.rank_processes import rank_processes
from oppo_megatron.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, INTERRUPTED
from oppo_megatron.processes import ONCE, hears

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def child_pids() -> list[int]:
    """Ranks that this process has started.

    As the system knows them: to ask `multiprocessing` within a signal's handler would take ends from who is asking just then.
    """
    return [rank.pid for rank in rank_processes(psutil.Process())]


class SignalRelay:
    """Tells the ranks to save the run and to end (SIGUSR1); a second SIGTERM or SIGINT (Ctrl-C) ends them at once, and so does
    the first signal where they save nothing (`saves`).

    Where a signal was sent to the whole process group, the ranks have had it already: SIGUSR1 asks for nothing twice.
    `code`: exit code of a run whose ranks were told to stop and could not save: 75 (start it again), 130 after SIGINT, else 0.
    `listeners` are the processes to tell, `everyone` those to end.
    """

    def __init__(
        self,
        listeners: Callable[[], Sequence[int]] = child_pids,
        everyone: Callable[[], Sequence[int]] = child_pids,
        saves: bool = True,
    ) -> None:
        self.code = 0
        self._saves = saves
        self._listeners, self._everyone = listeners, everyone
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
        before = {number: signal.signal(number, self._hear) for number in PASSED_ON if hears(number)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def tell(self) -> None:
        """The listeners that there are now."""
        _send(self._listeners(), signal.SIGUSR1)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE
        if self._told_at is None:
            self._told_at = time.monotonic()
            if number == signal.SIGINT and self._saves:
                print(INTERRUPTED, file=sys.stderr, flush=True)
        self._terms += number not in ONCE
        if self._terms > 1 or not self._saves:
            _send(self._everyone(), signal.SIGKILL)
            os._exit(128 + number)
        self.tell()


@contextmanager
def interrupts_from_here_alone() -> Iterator[None]:
    """Processes that the main thread starts in the block do not hear SIGINT, which a terminal sends to all of its processes: who
    has started them hears it, by another thread, and tells them."""
    resource_tracker.ensure_running()  # it would let the signal through again where it is started later
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP become SystemExit, with the exit code that a shell would give: what was started is ended on the way
    out.  Only a process's main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP) if hears(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
