"""An application served for real, a client, and a reward service that may answer anything, by a script."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from oppo_megatron.serving.server import server_settings

HTTP = httpx.Client(trust_env=False, verify=False, timeout=60.0, limits=httpx.Limits(max_keepalive_connections=0))
TOKEN = "a-token-of-enough-characters"


@contextmanager
def served_app(app: FastAPI, **limits: Any) -> Iterator[str]:
    settings = server_settings(app, **limits)
    settings.timeout_graceful_shutdown = 1
    server = uvicorn.Server(settings)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)


Reply = Callable[[dict[str, Any]], bytes]  # the request's JSON -> the whole HTTP answer; b"" closes the connection


def http(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def scored(request: dict[str, Any], value: Callable[[dict[str, Any]], Any]) -> bytes:
    rows = [{"id": item["id"], "score": value(item)} for item in request["items"]]
    return http(200, json.dumps({"scores": rows}).encode())


def by_length(request: dict[str, Any]) -> bytes:
    return scored(request, lambda item: float(len(item["response"])))


@dataclass
class Service:
    """`script` is used up first, one reply a request; then every request gets `otherwise`."""

    url: str
    script: list[Reply]
    otherwise: Reply
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, headers: dict[str, str], body: bytes) -> bytes:
        request = json.loads(body)
        with self.lock:
            self.requests.append(request)
            self.headers.append(headers)
            chosen = self.script.pop(0) if self.script else self.otherwise
        return chosen(request)


class _Handler(socketserver.StreamRequestHandler):
    timeout = 20

    def handle(self) -> None:
        self.rfile.readline()
        headers: dict[str, str] = {}
        while line := self.rfile.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        body = self.rfile.read(int(headers.get("content-length", 0)))
        try:
            self.wfile.write(self.server.service.reply(headers, body))
        except OSError:  # the client has gone
            pass


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    block_on_close = False
    service: Service


@contextmanager
def reward_service(*script: Reply, otherwise: Reply = by_length, port: int = 0) -> Iterator[Service]:
    with _Server(("127.0.0.1", port), _Handler) as server:
        server.service = Service(f"http://127.0.0.1:{server.server_address[1]}/score", list(script), otherwise)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server.service
        finally:
            server.shutdown()
