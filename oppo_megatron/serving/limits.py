"""What a service accepts; what is larger is answered with 413."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """Of one request: bytes of its body, items in it, characters of one prompt or response, seconds in which its body comes.

    `max_waiting`: requests being scored or waiting for it; others are answered with 429.
    """

    max_bytes: int = 8 << 20
    max_items: int = 256
    max_characters: int = 200_000
    max_waiting: int = 16
    read_s: float = 30.0


LIMITS = RequestLimits()
