"""A clock for what is measured and for what is shown of it."""

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
