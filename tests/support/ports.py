"""Ports for those who have to be told one before anybody opens it."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
