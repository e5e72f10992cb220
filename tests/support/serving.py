"""An application served for real, on a free port of the loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from oppo_megatron.serving.connections import CONNECTION_LIMITS, ConnectionLimits, Server, server_settings


@contextmanager
def served_app(app: FastAPI, limits: ConnectionLimits = CONNECTION_LIMITS) -> Iterator[str]:
    """The address of the application."""
    settings = server_settings(app, limits)
    settings.timeout_graceful_shutdown = 1
    server = Server(settings)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)
