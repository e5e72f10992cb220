"""The lock of a run directory, and errors about missing space."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oppo_megatron.errors import DISK_FULL, CheckpointError, ConfigError

HELD_WAIT_S = 20.0
"""Ranks that were just killed may still be ending."""


@contextmanager
def held(folder: Path, holder: Path, wait_s: float) -> Iterator[None]:
    """Lock the folder if the file system can.  Raises ConfigError after `wait_s`."""
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
                who = ""
                with suppress(OSError, ValueError, KeyError, TypeError):
                    found = json.loads(holder.read_text(encoding="utf-8"))
                    who = f" (process {found['pid']} on {found['host']})"
                raise ConfigError(
                    f"run_dir: another run uses {folder}{who}, and has been for {wait_s:g} s; wait for its end, end it (SIGTERM "
                    "saves it), or choose another run_dir"
                )
            time.sleep(0.1)
        with suppress(OSError):
            launcher = multiprocessing.parent_process()  # the process to signal; under another launcher the rank itself
            pid = os.getpid() if launcher is None or launcher.pid is None else launcher.pid
            holder.write_text(json.dumps({"pid": pid, "host": socket.gethostname()}), encoding="utf-8")
        try:
            yield
        finally:
            with suppress(OSError):
                holder.unlink()
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks on folders
        pass
    return True


@contextmanager
def clear_when_full(root: Path) -> Iterator[None]:
    """Raise CheckpointError if the disk fills."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise CheckpointError(
            f"{root}: no space left for the run's files ({error.strerror}; {megabytes(free_bytes(root))} are free); free some, "
            "or raise the limit, then continue from the last checkpoint with --resume"
        ) from error


def free_bytes(root: Path) -> int:
    while not root.exists():
        root = root.parent
    return shutil.disk_usage(root).free


def shortage(root: Path, needed: int) -> str | None:
    """Return a warning if fewer bytes are free."""
    free = free_bytes(root)
    if free >= needed:
        return None
    return (
        f"warning: {root} has {megabytes(free)} free, and the checkpoint takes about {megabytes(needed)} in addition to those "
        "that are kept; free some, or lower checkpoint.keep"
    )


def unwritten(folder: Path, reason: str, needed: int, last: str | None) -> CheckpointError:
    """`last`: the newest complete checkpoint."""
    left = "no checkpoint has been written yet" if last is None else f"the last whole checkpoint is {last}"
    return CheckpointError(
        f"{folder}: the checkpoint could not be written ({reason}); it takes about {megabytes(needed)}, and "
        f"{megabytes(free_bytes(folder.parent))} are free there; free some, lower checkpoint.keep, or move run_dir to a larger "
        f"disk, then continue with --resume: {left}, and nothing is left of this one"
    )


def megabytes(size: int) -> str:
    return f"{size / 2**20:.1f} MB"
