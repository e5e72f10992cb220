"""Measuring and showing time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TELL_S = 5.0
"""Seconds between two lines about a long phase."""


class SteadyClock:
    """Seconds since the epoch, advanced by monotonic time."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()


def format_duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class ByTime:
    """Passes on a line every `every_s` seconds, with the elapsed time."""

    def __init__(self, tell: Callable[[str], None], every_s: float = TELL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._every_s, self._clock = tell, every_s, clock
        self._started = self._told = clock()

    def __call__(self, line: str) -> None:
        now = self._clock()
        if now - self._told >= self._every_s:
            self._told = now
            self._tell(f"{line}, {format_duration(now - self._started)}")


@contextmanager
def while_silent(what: Callable[[], str], tell: Callable[[str], None]) -> Iterator[None]:
    """Tell every `TELL_S` seconds, from a thread, of work that does not report itself."""
    started, ended = time.monotonic(), threading.Event()

    def report() -> None:
        while not ended.wait(TELL_S):
            tell(f"{what()}, {format_duration(time.monotonic() - started)}")

    thread = threading.Thread(target=report, name="report", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def by_time(*, is_owner: bool = True) -> Callable[[str], None]:
    """Report a long phase on stderr, if owner."""
    return ByTime(to_stderr) if is_owner else lambda line: None
