"""Connections before a request is known: how long they may take to send one, and how many may be at it.

A connection *waits* while no request of it is under way: it has sent nothing, or a part of its headers, or it is kept alive.
Whoever is behind it is not known then, for the token is in the headers.  So nobody is refused for the number of those that
wait: one makes room for the next, first among those of the same peer, and of these one that has been answered before one whose
first request is awaited, and who has waited for longest.  An honest client, whose headers come at once, is never the one.
"""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

LATE = b"the headers of a request did not come in time"
GRACE_S = 5
_Queue: TypeAlias = "dict[GuardedProtocol, None]"


@dataclass(frozen=True)
class ConnectionLimits:
    """Of one server: connections that wait for a request, in all and of a peer, and seconds that one may wait.

    Neither may what is answered lie unread for longer.  `open`: connections in all; requests beyond are answered with 503.
    """

    waiting: int = 256
    waiting_of_peer: int = 128
    open: int = 512
    header_s: float = 10.0


CONNECTION_LIMITS = ConnectionLimits()


class WaitingRoom:
    """The connections of a server that wait, by peer.

    Of each peer two queues, in the order in which they began to: those that have been answered, and, cut after them, those whose
    first request is awaited.  Else answers given to many would push out one whose headers have not been read yet.
    """

    def __init__(self, limits: ConnectionLimits):
        self.limits = limits
        self._peers: dict[str, tuple[_Queue, _Queue]] = {}
        self._count = 0

    def enter(self, connection: GuardedProtocol) -> None:
        """It waits from now on; another may have to make room."""
        own = self._peers.setdefault(connection.peer, ({}, {}))
        own[connection.cycle is None][connection] = None
        self._count += 1
        if _size(own) > self.limits.waiting_of_peer:
            _first(own).cut()
        if self._count > self.limits.waiting:
            _first(max(self._peers.values(), key=_size)).cut()

    def leave(self, connection: GuardedProtocol) -> None:
        """It waits no longer."""
        own = self._peers[connection.peer]
        for queue in own:
            queue.pop(connection, None)
        self._count -= 1
        if not _size(own):
            del self._peers[connection.peer]


def _size(own: tuple[_Queue, _Queue]) -> int:
    return sum(map(len, own))


def _first(own: tuple[_Queue, _Queue]) -> GuardedProtocol:
    return next(chain(*own))


class GuardedProtocol(H11Protocol):
    """uvicorn's, with a deadline for the headers of each request and for the reading of answers.

    Bodies have their own (`Gate`): whose request is refused, or wants none, is answered before its body has come, and waits
    again.
    """

    room: WaitingRoom
    peer = ""
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.peer = network_of(self.client[0]) if self.client else ""
        self._look()

    def data_received(self, data: bytes) -> None:
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
        self._unread = self.loop.call_later(self.room.limits.header_s, self.transport.abort)

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
        """Whether the connection waits now; so does one that is being closed, until the peer has taken the answer."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_wait()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.room.limits.header_s, self._late)
            self.room.enter(self)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self.room.leave(self)

    def _late(self) -> None:
        """Close; with a reason where a part of the headers is there and the peer takes answers."""
        self._end_wait()
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if begun and not self.transport.is_closing() and not self.transport.get_write_buffer_size():
            head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain\r\ncontent-length: {len(LATE)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + LATE)
            self.transport.close()
        else:
            self.transport.abort()


def network_of(address: str) -> str:
    """The peer that is behind an address: of IPv6 its network of 64 bits, whose addresses one host may have all."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv4Address):
        return address
    return str(found.ipv4_mapped or int(found) >> 64)


def server_settings(app: FastAPI, limits: ConnectionLimits = CONNECTION_LIMITS) -> uvicorn.Config:
    """How a service is served."""

    class Protocol(GuardedProtocol):
        room = WaitingRoom(limits)

    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",  # a connection that changed its protocol would be beyond these limits
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=limits.open,
        timeout_graceful_shutdown=GRACE_S,
    )
