"""Time as it is measured, and as it is shown."""

from __future__ import annotations

import time


class SteadyClock:
    """Seconds since the epoch as the machine's clock had them when this was made, and from then on as they pass.

    Ranks on several machines can be shown side by side by it, and no span is negative where somebody sets the machine's clock.
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
