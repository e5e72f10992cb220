"""Calls a user's reward function; its exceptions, and its attempts to end the process, become errors."""

from __future__ import annotations

import contextlib
import importlib
import os
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IMPORTING = str(Path(importlib.__file__).parent)
OWN = str(Path(__file__).resolve().parent)
LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})
SHOWN_CHARACTERS = 500


class ProcessExit(Exception):
    """A user's function called `os._exit`, which would have ended the run without a word."""


def said_of(error: BaseException) -> str:
    """An exception of a user's code in one line: its class, what it says, and the user's line that it came from."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}, {error.filename}:{error.lineno}"
    name = "sys.exit" if isinstance(error, SystemExit) else type(error).__name__
    said = " ".join(str(error).split())[:SHOWN_CHARACTERS]
    frame = _users_frame(error)
    at = "" if frame is None else f" at {frame.filename}:{frame.lineno} in {frame.name}"
    return (f"{name}: {said}" if said else name) + at


def _users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line that is neither ours nor a library's; a library's where no other is there, but no import's own."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((OWN, IMPORTING, "<frozen"))
    ]
    theirs = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    found = theirs or frames
    return found[-1] if found else None


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
