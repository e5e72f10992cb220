"""The process of a service: uvicorn on a socket, until asked to stop.

Headers hold the token and have a deadline.  Waiting clients are unknown, so none is refused: the longest waiting is closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr
from uvicorn.protocols.http.h11_impl import H11Protocol

from oppo_megatron.config.serve import ServeConfig, is_loopback
from oppo_megatron.errors import ConfigError
from oppo_megatron.rewards.protocol import read_token
from oppo_megatron.serving.app import build_app, build_stream_app
from oppo_megatron.serving.scorers import open_scorer
from oppo_megatron.serving.stream_scorer import open_stream_scorer

HEADER_S = 10.0
MOST_WAITING = 256
"""Connections without a request in progress: headers incomplete, or kept alive."""
GRACE_S = 5
LATE = b"the headers of a request did not come in time"


class GuardedProtocol(H11Protocol):
    """Adds deadlines for headers and for reading an answer, and a bound on waiting connections."""

    header_s: float
    most_waiting: int
    waiting: dict[GuardedProtocol, None]  # the longest waiting first
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing pauses while any byte is unsent
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.header_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Handle a violation, perhaps during an answer."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what the application still says goes nowhere
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _look(self) -> None:
        if (self.cycle is not None and not self.cycle.response_complete) or self.transport.is_closing():
            self._end_wait()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.header_s, self._late)
            self.waiting[self] = None
            if len(self.waiting) > self.most_waiting:
                next(iter(self.waiting)).cut()

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            del self.waiting[self]

    def cut(self) -> None:
        self._end_wait()
        self.transport.abort()

    def _late(self) -> None:
        self._end_wait()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0] and not self.transport.is_closing():
            head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain\r\ncontent-length: {len(LATE)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + LATE)
        self.transport.close()


def server_settings(app: FastAPI, header_s: float = HEADER_S, most_waiting: int = MOST_WAITING) -> uvicorn.Config:
    limits = {"header_s": header_s, "most_waiting": most_waiting, "waiting": {}}
    return uvicorn.Config(
        app,
        http=type("Protocol", (GuardedProtocol,), limits),
        ws="none",  # a connection that changed its protocol would be beyond these limits
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )


def serve(config: ServeConfig, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Serve until interrupted; `say` gets the address.  Raises ConfigError for a missing token or unusable address."""
    token = None if config.token_env is None else read_token(config.token_env, environment)
    with (
        bound_socket(config.host, config.port, guarded=token is not None) as listening,
        _open_app(config, environment, token) as app,
    ):
        host, port = listening.getsockname()[:2]
        listening.listen()
        what, path = ("streamed rewards", "") if config.streams else ("rewards", "/score")
        say(f"serving {what} at http://{f'[{host}]' if ':' in host else host}:{port}{path}")
        uvicorn.Server(server_settings(app)).run(sockets=[listening])


@contextmanager
def _open_app(config: ServeConfig, environment: Mapping[str, str], token: SecretStr | None) -> Iterator[FastAPI]:
    if config.streams:
        with open_stream_scorer(config) as scorer:
            yield build_stream_app(scorer.extend, token)
    else:
        with open_scorer(config, environment) as score:
            yield build_app(score, token)


def bound_socket(host: str, port: int, *, guarded: bool) -> socket.socket:
    """Return a socket, not yet listening; without a token (`guarded`), loopback only."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError, TypeError, ValueError) as error:  # the latter two for an invalid host name
        found.close()
        raise ConfigError(f"host {host!r}, port {port} cannot be listened on ({error}); name others") from error
    address = found.getsockname()[0]
    if not guarded and not is_loopback(address):  # a name is resolved by the hosts file or a name server
        found.close()
        raise ConfigError(f"host {host!r} is {address} here, which others can reach, but token_env is not set; set it")
    return found
