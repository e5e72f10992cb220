"""Bodies of requests while they come: how long one may take, and how many may be at it, in number and in bytes.

A service without a token knows nothing of who sends one.  So nobody is refused for those that are on their way: the one that
has been so for longest makes room, with 429.  An honest client, whose body comes at once, is never the one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fastapi import Request
from starlette.requests import ClientDisconnect


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request: bytes of its body, items, characters of one prompt or response, seconds for its body to arrive.

    A larger request is answered with 413.  `max_waiting`: requests that are being scored or wait for it; more are answered
    with 429.  `max_coming`: bodies that are on their way, and with `max_waiting * max_bytes` their bytes, beyond which the
    oldest makes room; for their number alone not before it has had `young_s` seconds.
    """

    max_bytes: int = 8 << 20
    max_items: int = 256
    max_characters: int = 200_000
    max_waiting: int = 16
    max_coming: int = 128
    read_s: float = 30.0
    young_s: float = 0.25


LIMITS = RequestLimits()
TURNS = 3
"""Turns of the event loop between the arrival of the rest of a body and the end of its reading."""


class Refusal(Exception):
    """The request gets `status` and a reason instead of scores."""

    def __init__(self, status: int, reason: str, **headers: str):
        super().__init__(reason)
        self.status, self.headers = status, headers


@dataclass(eq=False)
class _Body:
    since_s: float
    content: bytearray = field(default_factory=bytearray)
    reading: asyncio.Future[None] | None = None
    makes_room: bool = False


class Bodies:
    """The request bodies that a service is receiving."""

    def __init__(self, limits: RequestLimits):
        self._limits = limits
        self._coming: dict[_Body, None] = {}  # in the order of their start
        self._num_bytes = 0

    async def read(self, request: Request) -> bytes:
        """A whole body, read no further than allowed, whatever the request says of its length.  Raises Refusal."""
        limit, announced = self._limits.max_bytes, request.headers.get("content-length", "")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
            raise _too_large(limit)
        body = _Body(asyncio.get_running_loop().time())
        self._coming[body] = None
        body.reading = asyncio.ensure_future(self._read(request, body))
        self._make_room()
        try:
            await asyncio.wait_for(body.reading, self._limits.read_s)
            return bytes(body.content)
        except asyncio.CancelledError:
            if body in self._coming:  # the service ends
                raise
            raise Refusal(429, "too many bodies are on their way", **{"Retry-After": "1"}) from None
        except asyncio.TimeoutError:
            raise Refusal(408, f"the body did not come within {self._limits.read_s:g} s") from None
        except ClientDisconnect:
            raise Refusal(400, "the body ended early") from None
        finally:
            self._forget(body)

    async def _read(self, request: Request, body: _Body) -> None:
        async for piece in request.stream():
            body.content.extend(piece)
            self._num_bytes += len(piece)
            if len(body.content) > self._limits.max_bytes:
                raise _too_large(self._limits.max_bytes)
            self._make_room()

    def _make_room(self) -> None:
        limits, loop = self._limits, asyncio.get_running_loop()
        while self._num_bytes > limits.max_bytes * limits.max_waiting:
            self._refuse(next(iter(self._coming)))
        staying = [body for body in self._coming if not body.makes_room]
        for oldest in staying[: -limits.max_coming]:
            if loop.time() - oldest.since_s >= limits.young_s:
                oldest.makes_room = True
                loop.call_later(0, self._refuse_unread, oldest, TURNS)

    def _refuse_unread(self, body: _Body, turns: int) -> None:
        """Refuse a body unless its rest has come meanwhile: if the loop is slow, it may have arrived unread."""
        if turns:
            asyncio.get_running_loop().call_later(0, self._refuse_unread, body, turns - 1)
        elif body in self._coming:
            self._refuse(body)

    def _refuse(self, body: _Body) -> None:
        self._forget(body)
        if body.reading is not None:
            body.reading.cancel()

    def _forget(self, body: _Body) -> None:
        if body in self._coming:
            del self._coming[body]
            self._num_bytes -= len(body.content)


def _too_large(limit: int) -> Refusal:
    return Refusal(413, f"the body has more than {limit} bytes")
