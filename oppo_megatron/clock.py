"""Measuring and showing time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

TELL_S = 5.0
"""Between two lines about a long phase."""


class SteadyClock:
    """Seconds since the epoch: the machine's clock at construction, plus the monotonic time passed since.

    Ranks on several machines can be shown side by side, and no span is negative if the machine's clock is set meanwhile.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()


def format_duration(seconds: float) -> str:
    """7s, 3m07s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class ByTime:
    """Tells how far a long phase has come: of the lines that it is given, one each `every_s` seconds."""

    def __init__(
        self, tell: Callable[[str], None], every_s: float = TELL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell, self._every_s, self._clock = tell, every_s, clock
        self._started = self._told = clock()

    def __call__(self, line: str) -> None:
        """Tell the line, with the seconds since the start, if the last one is long enough ago."""
        now = self._clock()
        if now - self._told >= self._every_s:
            self._told = now
            self._tell(f"{line}, {format_duration(now - self._started)}")


def by_time(*, is_owner: bool = True) -> Callable[[str], None]:
    """Tell of a long phase on the standard error; on a rank that is not the `owner`, of nothing."""
    return ByTime(lambda line: print(line, file=sys.stderr, flush=True)) if is_owner else lambda line: None
