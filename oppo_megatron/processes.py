"""Child processes that end with their parent, resource limits, and deferred signals."""

from __future__ import annotations

import ctypes
import io
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import EIO
from functools import partial
from pathlib import Path
from typing import Any, cast

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONCE = (signal.SIGUSR1, signal.SIGHUP)
"""Stop signals that count once: shell and kernel each send SIGHUP when a terminal closes."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int | None = None) -> None:
    """Let the kernel end this process when the starting thread ends; now if `parent` is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent not in (None, os.getppid()):
        os._exit(0)


def hears(number: int) -> bool:
    """False if a signal must stay ignored (SIGHUP under `nohup`)."""
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


class _Terminal(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != EIO:
                raise
            return len(data)


def outlive_terminal() -> None:
    for name in ("stdout", "stderr"):
        stream = cast(io.TextIOWrapper, getattr(sys, name))
        if stream is getattr(sys, f"__{name}__") and stream is not None and stream.isatty():
            stream.flush()
            buffer = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True))


def terminate(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    process.wait()


def limit_resource(what: int, most: int) -> None:
    """Set soft and hard limit, up to the present hard limit."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def allow_processor_time(seconds: int) -> None:
    """Grant `seconds` more CPU time by the soft limit, whose signal kills."""
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
    """Run a process with output in `log`, ended by `end` with the block.  Signals wait until it can be ended."""
    held = _Held()
    process = None
    try:
        with log.open("wb") as output:
            # S603: commands are this project's own, without a shell.
            process = subprocess.Popen(  # noqa: S603
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=own_session,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )  # fmt: skip
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
    """Delay signal handlers: some C++ libraries swallow an exception during import, or abort."""
    held = _Held()
    try:
        yield
    finally:
        held.deliver()


class _Held:
    def __init__(self) -> None:
        self._came: list[int] = []
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: handler for number in ENDING if callable(handler := signal.getsignal(number))}
        for number in self._handlers:
            signal.signal(number, lambda number, frame: self._came.append(number))

    def deliver(self) -> None:
        for number, handler in list(self._handlers.items()):
            signal.signal(number, handler)
            del self._handlers[number]
        while self._came:
            signal.raise_signal(self._came.pop(0))
