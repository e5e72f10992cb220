"""Retries of a failing service: growing pauses, and a circuit breaker that many senders share.  No I/O here."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

from tenacity import RetryCallState, wait_exponential


@dataclass(frozen=True)
class Pauses:
    """When a failed request is sent again.

    `retry_s`: before the second attempt, doubled for each further one up to `retry_max_s`.  After `breaker_failures` in a row
    only one request is tried, every `breaker_pause_s`.
    """

    retry_s: float = 0.5
    retry_max_s: float = 30.0
    breaker_failures: int = 5
    breaker_pause_s: float = 10.0


PAUSES = Pauses()


class CircuitBreaker:
    """Keeps senders away from a service that is down.

    closed --`failures` in a row--> open --`pause_s` later--> half open: one request, the probe
       ^                              ^                          |
       +----- the probe succeeded ----+---- the probe failed ----+
    """

    def __init__(self, failures: int, pause_s: float, clock: Callable[[], float]):
        self._limit, self._pause_s, self._clock = failures, pause_s, clock
        self._in_a_row = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> str:
        if self._opened_at is None:
            return "closed"
        return "half open" if self._probing or self._left_s() <= 0 else "open"

    def enter(self) -> float:
        """Return 0.0 to send now (then call `succeeded` or `failed`), else the seconds after which to ask again."""
        if self._opened_at is None:
            return 0.0
        if self._probing:
            return self._pause_s
        if (left_s := self._left_s()) > 0:
            return left_s
        self._probing = True
        return 0.0

    def succeeded(self) -> None:
        self._in_a_row, self._opened_at, self._probing = 0, None, False

    def failed(self) -> None:
        """A request that had been let in failed; those let in before the breaker opened do not prolong the pause."""
        self._in_a_row += 1
        if self._probing or (self._opened_at is None and self._in_a_row >= self._limit):
            self._opened_at, self._probing = self._clock(), False

    def _left_s(self) -> float:
        assert self._opened_at is not None
        return self._opened_at + self._pause_s - self._clock()


def growing_pauses(first_s: float, longest_s: float, chance: random.Random) -> Callable[[RetryCallState], float]:
    """Pauses that double, shortened by up to a half at random, so that senders do not come back together."""
    full_s = wait_exponential(multiplier=first_s, max=longest_s)
    return lambda state: full_s(state) * chance.uniform(0.5, 1.0)


def retry_after_s(value: str | None, now: datetime | None = None) -> float:
    """The seconds that a `Retry-After` header asks for (RFC 9110: seconds or a date); 0.0 if it cannot be read."""
    if value is None:
        return 0.0
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        date = parsedate_to_datetime(text)
        return max(0.0, (date - (now or datetime.now(timezone.utc))).total_seconds())
    except (TypeError, ValueError, OverflowError):
        return 0.0
