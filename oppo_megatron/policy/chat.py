"""A conversation in the terminal.  No torch."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

from oppo_megatron.errors import DataError
from oppo_megatron.policy.given_prompts import opening

Messages = list[dict[str, Any]]
RESET = "/reset"
HELP = f"{RESET} starts again, Ctrl-C ends an answer, Ctrl-D ends the chat"


def converse(system: str | None, read: Callable[[], str | None], answer: Callable[[Messages], str]) -> None:
    """Answer until `read` returns None.  A turn without room for an answer (DataError) is dropped."""
    messages = opening(system)
    while (line := read()) is not None:
        if line.strip() == RESET:
            messages = opening(system)
        elif line.strip():
            asked = [*messages, {"role": "user", "content": line}]
            try:
                text = answer(asked)
            except DataError as error:
                print(f"{error} ({RESET} starts again)", file=sys.stderr, flush=True)
                continue
            messages = [*asked, {"role": "assistant", "content": text}]


@contextmanager
def open_lines(source: str | None) -> Iterator[Callable[[], str | None]]:
    """Yield a reader of a line of standard input, or of `source`; None at the end."""
    with nullcontext(sys.stdin) if source is None else open(source, encoding="utf-8") as stream:
        yield lambda: _line(stream)


def parent_input() -> str:
    """Path of this process's standard input for a child process."""
    return f"/proc/{os.getpid()}/fd/0"


def _line(stream: TextIO) -> str | None:
    if stream is sys.stdin and stream.isatty():  # with the terminal's line editing, if Python has it
        try:
            return input("> ")
        except EOFError:
            print(flush=True)
            return None
    if stream.isatty():
        print("> ", end="", flush=True)
    line = stream.readline()
    return line.rstrip("\n") if line else None


@contextmanager
def until_interrupted() -> Iterator[Callable[[], bool]]:
    """Yield a function that reports Ctrl-C, which then raises nothing; main thread only."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.set())
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
