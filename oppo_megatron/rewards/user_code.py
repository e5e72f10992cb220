"""Keeps a user's reward function from ending the process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any


class ProcessExit(Exception):
    """A user's function called `os._exit`, which would have ended the run without a word."""


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """While the block runs, `os._exit` raises `ProcessExit` in this thread; processes made meanwhile end as they ask to."""
    leave, process, thread = os._exit, os.getpid(), threading.get_ident()

    def told(code: int) -> Any:
        if (os.getpid(), threading.get_ident()) == (process, thread):
            raise ProcessExit(f"os._exit({code})")
        leave(code)

    os._exit = told  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave
