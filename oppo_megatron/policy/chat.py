"""A conversation in the terminal.  No torch."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from oppo_megatron.errors import DataError
from oppo_megatron.policy.given_prompts import opening

Messages = list[dict[str, Any]]
RESET = "/reset"
HELP = f"{RESET} begins anew, Ctrl-C ends an answer, Ctrl-D ends the chat"


def converse(system: str | None, read: Callable[[], str | None], answer: Callable[[Messages], str]) -> None:
    """Ask and answer until `read` returns None.  `answer` also shows its text.

    A turn that leaves no room for an answer (DataError) is dropped.
    """
    messages = opening(system)
    while (line := read()) is not None:
        if line.strip() == RESET:
            messages = opening(system)
        elif line.strip():
            asked = [*messages, {"role": "user", "content": line}]
            try:
                text = answer(asked)
            except DataError as error:
                print(f"{error} ({RESET} begins anew)", file=sys.stderr, flush=True)
                continue
            messages = [*asked, {"role": "assistant", "content": text}]


@contextmanager
def open_lines(source: str | None) -> Iterator[Callable[[], str | None]]:
    """Lines of standard input, or of the starting process's."""
    if source is None:
        yield lambda: _line(sys.stdin)
        return
    with open(source, encoding="utf-8") as stream:
        yield lambda: _line(stream)


def parent_input() -> str:
    """This process's standard input, as a path for a child process."""
    return f"/proc/{os.getpid()}/fd/0"


def _line(stream: TextIO) -> str | None:
    if not stream.isatty():
        line = stream.readline()
        return line.rstrip("\n") if line else None
    if stream is sys.stdin:  # with the terminal's line editing, where Python has it
        try:
            return input("> ")
        except EOFError:
            print(flush=True)
            return None
    print("> ", end="", flush=True)
    line = stream.readline()
    return line.rstrip("\n") if line else None


@contextmanager
def until_interrupted() -> Iterator[Callable[[], bool]]:
    """Count Ctrl-C instead of raising; the yielded function reports one.  Main thread only."""
    heard = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        heard = True

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: heard
    finally:
        signal.signal(signal.SIGINT, before)
