"""Ways for a process to be killed, or to be refused, while it writes below a folder."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}
CACHE_FILE, COMMON_FILE = "rank-00000.safetensors", "common.pt"  # opened by libraries that tell Python nothing


@dataclass(frozen=True)
class AtEvent:
    """SIGKILL before the `number`-th change of names or opening for writing below the folder."""

    number: int


@dataclass(frozen=True)
class AtByte:
    """The kernel's end for a process (SIGXFSZ) that writes beyond byte `offset` of the file called `name`."""

    name: str
    offset: int


Fault = AtEvent | AtByte


def count_events(folder: Path, on_event: Callable[[str], None]) -> None:
    """Call `on_event` before each change below `folder`, for good: an audit hook cannot be taken out again."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writing = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or writing:
            path = str(args[0])
            if event in ("os.remove", "os.rmdir") and args[1] != -1:  # relative to a folder that is open
                path = os.path.join(os.readlink(f"/proc/self/fd/{args[1]}"), path)
            if str(folder) in path:
                on_event(path)

    sys.addaudithook(hook)


def arm(fault: Fault, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if isinstance(fault, AtByte):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        count_events(folder, lambda path: limit_files(fault.offset) if Path(path).name == fault.name else None)
        return
    seen = [0]

    def maybe_die(path: str) -> None:
        if seen[0] == fault.number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1

    count_events(folder, maybe_die)


def limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
