"""An application served for real, on a free port of the loopback, and a client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
