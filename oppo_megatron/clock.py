"""Measuring and showing time."""

from __future__ import annotations

import time


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
