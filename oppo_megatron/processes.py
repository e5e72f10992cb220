"""Child processes that end with this one, their limits, and signals deferred until they can be handled."""

from __future__ import annotations

import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Ask for the end, and wait for it."""
    if process.poll() is None:
        process.terminate()
    process.wait()


def limit_resource(what: int, most: int) -> None:
    """Set the soft and the hard limit of this process, but never above a hard limit that is there."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def allow_processor_time(seconds: int) -> None:
    """Let this process use so much more than it has.  The soft limit only: it moves with each call, and its signal kills."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


@contextmanager
def started(
    command: Sequence[str | Path],
    log: Path,
    end: Callable[[subprocess.Popen[bytes]], None] = terminate,
    environment: Mapping[str, str] | None = None,
    own_session: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in `log`, which `end` ends with the block.

    A signal that would leave the block by an exception waits until the process can be ended: between its start and its handle
    nothing else would.
    """
    held = _Held()
    process = None
    try:
        with log.open("wb") as output:
            # S603: commands are this project's own, without a shell.
            process = subprocess.Popen(  # noqa: S603
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=own_session
            )
        held.deliver()
        yield process
    finally:
        try:
            held.deliver()
        finally:
            if process is not None:
                end(process)


@contextmanager
def signals_held() -> Iterator[None]:
    """What would leave the block by an exception of a signal's handler waits for its end.

    For imports of libraries with halves in C++: some swallow an exception that comes with their import, and some
    end the process.
    """
    held = _Held()
    try:
        yield
    finally:
        held.deliver()


class _Held:
    """Signals that have come since, for the handlers that there were; those that are ignored, or end a process without a
    handler, are left alone.  Handlers run in the main thread alone: nowhere else is there anything to hold."""

    def __init__(self) -> None:
        self._came: list[int] = []
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: handler for number in ENDING if callable(handler := signal.getsignal(number))}
        for number in self._handlers:
            signal.signal(number, lambda number, frame: self._came.append(number))

    def deliver(self) -> None:
        """Give the handlers back, and tell them what has come; a second call does nothing."""
        for number, handler in list(self._handlers.items()):
            signal.signal(number, handler)
            del self._handlers[number]
        while self._came:
            signal.raise_signal(self._came.pop(0))
