"""Pass on signals of the starting process to its ranks, or turn them into exits."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from types import FrameType
from typing import NoReturn

import psutil

from oppo_megatron.cluster.rank_processes import rank_processes
from oppo_megatron.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, INTERRUPTED
from oppo_megatron.processes import ONCE, hears

PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class SignalRelay:
    """Asks the ranks to save and end (SIGUSR1); a second SIGTERM or SIGINT, or the first without `saves`, ends them.

    `code`: exit code of a run that was stopped unsaved: 75 (start it again), 130 after SIGINT, else 0.
    """

    def __init__(self, saves: bool = True) -> None:
        self.code = 0
        self._saves = saves
        self._terms = 0
        self._asked_at: float | None = None

    def asked_s(self) -> float | None:
        """Seconds since the ranks were first asked to stop, or None."""
        return None if self._asked_at is None else time.monotonic() - self._asked_at

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with _handled({number: self._hear for number in PASSED_ON if hears(number)}):
            yield

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._saves and not list(rank_processes(psutil.Process())):  # nothing has begun, or all is done
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(EXIT_REQUEUE)
        self.code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            if number == signal.SIGINT and self._saves:
                print(INTERRUPTED, file=sys.stderr, flush=True)
        self._terms += number not in ONCE
        if self._terms > 1 or not self._saves:
            _send_to_ranks(signal.SIGKILL)
            os._exit(128 + number)
        _send_to_ranks(signal.SIGUSR1)


def _send_to_ranks(number: signal.Signals) -> None:
    # psutil's processes: in a signal handler, `multiprocessing` would take exit codes from the code it interrupts.
    for rank in rank_processes(psutil.Process()):
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)


@contextmanager
def _handled(handlers: dict[signal.Signals, Callable[[int, FrameType | None], object]]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_from_here_alone() -> Iterator[None]:
    """Block SIGINT in processes started in the block: a terminal sends it to all, but this process signals the ranks."""
    resource_tracker.ensure_running()  # started later, it would let the signal through
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Turn SIGTERM, SIGHUP and SIGUSR1 into SystemExit with a shell's exit code, so that cleanup ends child processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    with _handled({number: end for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) if hears(number)}):
        yield
