"""The message about a full disk: path, reason, bytes needed and free, and the remedy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oppo_megatron.errors import DISK_FULL, CheckpointError


@contextmanager
def clear_when_full(root: Path) -> Iterator[None]:
    """A block that writes below `root`.  Raises CheckpointError where the disk is full, which the system says without a path."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise CheckpointError(
            f"{root}: what the run writes finds no place ({error.strerror}; {megabytes(free_bytes(root))} are free); free some, "
            "or raise the limit, then continue from the last checkpoint with --resume"
        ) from error


def free_bytes(root: Path) -> int:
    """Bytes that this user may still write to the file system of `root`, by what that says of itself."""
    while not root.exists():
        root = root.parent
    return shutil.disk_usage(root).free


def shortage(root: Path, needed: int) -> str | None:
    """A warning before a checkpoint of `needed` bytes is written, where they are not free.  Quotas it does not know."""
    free = free_bytes(root)
    if free >= needed:
        return None
    return (
        f"warning: {root} has {megabytes(free)} free, and the checkpoint takes about {megabytes(needed)} beside those that "
        "are kept; free some, or lower checkpoint.keep"
    )


def unwritten(folder: Path, reason: str, needed: int, last: str | None) -> CheckpointError:
    """The error of a checkpoint that could not be written into `folder`; `last` is the newest that is whole."""
    left = "there is no checkpoint yet" if last is None else f"the last whole checkpoint is {last}"
    return CheckpointError(
        f"{folder}: the checkpoint could not be written ({reason}); it takes about {megabytes(needed)}, and "
        f"{megabytes(free_bytes(folder.parent))} are free there; free some, lower checkpoint.keep, or move run_dir to a larger "
        f"disk, then continue with --resume: {left}, and nothing is left of this one"
    )


def megabytes(size: int) -> str:
    """Bytes for reading."""
    return f"{size / 2**20:.1f} MB"
