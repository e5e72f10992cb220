"""Connections before a request is known: limits on the time to send one, and on the number of such connections.

A connection *waits* while no request of it is under way: it has sent nothing, or a part of its headers, or it is kept alive.
The client is not known then, because the token is in the headers.  So no connection is refused because of the number of waiting
ones: one is closed for the next, first among those of the same peer, and there the one that has waited longest.  An honest
client, whose headers come at once, is never closed.  Kept-alive connections are closed only for other kept-alive ones, so that
neither kind can push out the other.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

LATE = b"the headers of a request did not come in time"
GRACE_S = 5
_Queue: TypeAlias = "dict[GuardedProtocol, float]"  # since when, by the loop's clock


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one server: connections that wait for their first request, in all and per peer, and the seconds of a wait.

    The same numbers apply to connections that wait for a further request, and the seconds also to an answer that is not read.
    No connection is closed within its first `young_s` seconds, unless there are more than `open` connections; `open` must be
    within the number of files that a process may open.
    """

    waiting: int = 256
    waiting_of_peer: int = 128
    open: int = 768
    header_s: float = 10.0
    young_s: float = 0.25


CONNECTION_LIMITS = ConnectionLimits()
REST_BYTES = 64 << 20
"""Bytes of a refused body that are taken and dropped after the answer."""
AT_ONCE, QUEUED = 32, 2048
"""Connections taken before those that are there are read again, and those that the system keeps until they are taken."""


class WaitingRoom:
    """The waiting connections of a server, by peer, in the order in which they began to wait."""

    def __init__(self, limits: ConnectionLimits):
        self.limits = limits
        self._peers: dict[str, _Queue] = {}
        self._count = 0

    def enter(self, connection: GuardedProtocol) -> None:
        """It waits from now on; others may have to make room."""
        now_s = connection.loop.time()
        own = self._peers.setdefault(connection.peer, {})
        own[connection] = now_s
        self._count += 1
        while len(own) > self.limits.waiting_of_peer and self._cut_first(own, now_s):
            pass
        while self._count > self.limits.waiting and self._cut_first(max(self._peers.values(), key=len), now_s):
            pass

    def _cut_first(self, own: _Queue, now_s: float) -> bool:
        """True if a connection of this peer was closed to make room."""
        first, since_s = next(iter(own.items()))
        if now_s - since_s < self.limits.young_s and len(first.connections) <= self.limits.open:
            return False
        first.cut()
        return True

    def leave(self, connection: GuardedProtocol) -> None:
        """It waits no longer."""
        own = self._peers[connection.peer]
        del own[connection]
        self._count -= 1
        if not own:
            del self._peers[connection.peer]


class _Transport:
    """A transport that `linger` may keep from being closed: it says no more then, and takes what still comes."""

    def __init__(self, transport: Any, linger: Callable[[Any], bool]):
        self._transport, self._linger, self._lingers = transport, linger, False

    def close(self) -> None:
        self._lingers = not self.is_closing() and self._linger(self._transport)
        if not self._lingers:
            self._transport.close()

    def is_closing(self) -> bool:
        return self._lingers or bool(self._transport.is_closing())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GuardedProtocol(H11Protocol):
    """uvicorn's, with a deadline for the headers of each request and for the reading of answers.

    Bodies have their own (`Gate`): whose request is refused, or wants none, is answered before its body has come, and waits
    again, or is closed.  Clients send a body before they read the answer, and the system resets a connection that is closed with
    bytes unread: so the rest of the body is taken and dropped, up to `REST_BYTES`, until the peer closes or the deadline passes.
    """

    limits: ConnectionLimits
    rooms: tuple[
        WaitingRoom, WaitingRoom, WaitingRoom
    ]  # of those answered, of those that were not yet, of those being closed
    peer = ""
    _room: WaitingRoom | None = None
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _rest_bytes: int | None = None  # taken of a body since its request was refused

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Transport(transport, self._linger))  # type: ignore[arg-type]
        self.peer = network_of(self.client[0]) if self.client else ""
        self._look()

    def _linger(self, transport: Any) -> bool:
        """Start to take the rest of a request after its answer; True if that was possible."""
        if self.conn.their_state not in (h11.SEND_BODY, h11.ERROR) or not transport.can_write_eof():
            return False
        self._rest_bytes = 0
        transport.write_eof()
        transport.resume_reading()
        self._end_wait()
        self._wait_in(2)
        return True

    def data_received(self, data: bytes) -> None:
        if self._rest_bytes is not None:
            self._rest_bytes += len(data)
            if self._rest_bytes > REST_BYTES:
                self.cut()
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """The peer breaks the protocol; in the body of a request, whose answer is this one then, or has begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what the application still says goes nowhere
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.limits.header_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def cut(self) -> None:
        """Close at once, without an answer."""
        self._end_wait()
        self.transport.abort()

    def _look(self) -> None:
        """Update whether the connection waits; one that is being closed waits until the peer has taken the answer."""
        if self._rest_bytes is not None:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_wait()
        elif self._deadline is None:
            self._wait_in(2 if self.transport.is_closing() else self.cycle is None)

    def _wait_in(self, room: int) -> None:
        self._deadline = self.loop.call_later(self.limits.header_s, self._late)
        self._room = self.rooms[room]
        self._room.enter(self)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            assert self._room is not None, "it has entered one"
            self._room.leave(self)

    def _late(self) -> None:
        """Close; with a reason if part of the headers has come and the peer takes answers."""
        self._end_wait()
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if begun and not self.transport.is_closing() and not self.transport.get_write_buffer_size():
            head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain\r\ncontent-length: {len(LATE)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + LATE)
            self.transport.close()
        else:
            self.transport.abort()


def network_of(address: str) -> str:
    """Return the peer of an address; for IPv6 its 64-bit network, because one host may have all of its addresses."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(found.ipv4_mapped or int(found) >> 64)


def server_settings(app: FastAPI, limits: ConnectionLimits = CONNECTION_LIMITS) -> uvicorn.Config:
    """How a service is served."""
    given = limits

    class Protocol(GuardedProtocol):
        limits = given
        rooms = WaitingRoom(limits), WaitingRoom(limits), WaitingRoom(limits)

    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",  # a connection that changed its protocol would be beyond these limits
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=AT_ONCE,
        timeout_graceful_shutdown=GRACE_S,
    )


class Server(uvicorn.Server):
    """Takes few connections at a time, so that each is read soon; others wait their turn in the system."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUED)
