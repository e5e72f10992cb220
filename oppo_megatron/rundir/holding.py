"""The lock on a run directory, and the file that names the process that holds it."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oppo_megatron.errors import ConfigError

HELD_WAIT_S = 20.0
"""Ranks that were just killed may still be ending."""


@contextmanager
def held(folder: Path, holder: Path, wait_s: float) -> Iterator[None]:
    """Lock the folder until the block or the process ends; without effect if the file system has no locks.

    The file `holder` only informs; one left by a killed process does not matter.  Raises ConfigError if another process
    holds the folder for `wait_s`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # `prepare` reports the fault
        yield
        return
    try:
        until = time.monotonic() + wait_s
        while not _locked(handle):
            if time.monotonic() > until:
                raise ConfigError(
                    f"run_dir: another run uses {folder}{_described(holder)}, and has been for {wait_s:g} s; wait for "
                    "its end, end it (SIGTERM saves it), or choose another run_dir"
                )
            time.sleep(0.1)
        with suppress(OSError):
            holder.write_text(json.dumps({"pid": _launcher_pid(), "host": socket.gethostname()}), encoding="utf-8")
        try:
            yield
        finally:
            with suppress(OSError):
                holder.unlink()
    finally:
        os.close(handle)


def _described(holder: Path) -> str:
    try:
        found = json.loads(holder.read_text(encoding="utf-8"))
        return f" (process {found['pid']} on {found['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _launcher_pid() -> int:
    """The process to signal to end the run: this rank's launcher, or the rank itself under another launcher."""
    launcher = multiprocessing.parent_process()
    return os.getpid() if launcher is None or launcher.pid is None else launcher.pid


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks on folders
        pass
    return True
