"""Processes that a test has to do with, which may end at any moment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil


def python_path(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def runs(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has asked for yet has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marked(mark: str) -> list[int]:
    """Processes that have not ended and have `mark`, as NAME=value, in the environment that they were started with."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError):
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and runs(pid):
                found.append(pid)
    return found


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it has not come true"
        time.sleep(0.02)


def listeners(pid: int) -> set[tuple[str, int]]:
    connections = psutil.Process(pid).net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
