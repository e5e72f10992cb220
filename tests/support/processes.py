"""Processes that a test has to do with, ports for them, and a limit on the growth of this one."""

import gc
import os
import random
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


LOWEST = 20_000
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A free loopback port; one bound as 0 and closed is assigned again, for instance to gloo groups of other tests."""
    highest = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32_768
    chance = random.SystemRandom()  # other processes of the tests choose, too
    while True:
        port = chance.randrange(min(LOWEST, highest // 2), highest)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


@contextmanager
def held_port() -> Iterator[int]:
    """A port of the loopback at which nobody listens while the block lasts."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def free_ports(count: int) -> list[int]:
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


MIB = 2**20


@contextmanager
def room_for(mebibytes: int) -> Iterator[None]:
    """Give the block address space for so much beyond what the process has now."""
    gc.collect()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + mebibytes * MIB, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def listeners(pid: int) -> set[tuple[str, int]]:
    connections = psutil.Process(pid).net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def own_lines(errors: str) -> list[str]:
    """Leave out what a busy machine says of imports, and a CUDA build of torch without a device."""
    return [line for line in errors.splitlines() if not re.match(r"importing libraries, |W\d.*No CUDA runtime is found", line)]
