"""The message about a full disk: path, reason, bytes needed and free, and the remedy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oppo_megatron.errors import DISK_FULL, CheckpointError


@contextmanager
def clear_when_full(root: Path) -> Iterator[None]:
    """Raise CheckpointError if the disk is full while the block writes below `root`; the system's error names no path."""
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
    """Bytes free for this user on the file system of `root`."""
    while not root.exists():
        root = root.parent
    return shutil.disk_usage(root).free


def shortage(root: Path, needed: int) -> str | None:
    """A warning if fewer than `needed` bytes are free for a checkpoint; quotas are not known."""
    free = free_bytes(root)
    if free >= needed:
        return None
    return (
        f"warning: {root} has {megabytes(free)} free, and the checkpoint takes about {megabytes(needed)} in addition to those "
        "that are kept; free some, or lower checkpoint.keep"
    )


def unwritten(folder: Path, reason: str, needed: int, last: str | None) -> CheckpointError:
    """The error for a checkpoint that could not be written into `folder`; `last` is the newest complete one."""
    left = "there is no checkpoint yet" if last is None else f"the last whole checkpoint is {last}"
    return CheckpointError(
        f"{folder}: the checkpoint could not be written ({reason}); it takes about {megabytes(needed)}, and "
        f"{megabytes(free_bytes(folder.parent))} are free there; free some, lower checkpoint.keep, or move run_dir to a larger "
        f"disk, then continue with --resume: {left}, and nothing is left of this one"
    )


def megabytes(size: int) -> str:
    """Format a number of bytes."""
    return f"{size / 2**20:.1f} MB"
