"""Memory of the host that copies under way still read or write: the host may not touch it before it has waited for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from tests.rehearsal.streams import Clock

Time = tuple[int, int]
"""(stream, time)"""


class Copy(NamedTuple):
    """`memory` is held, so that no other has its number meanwhile."""

    memory: Tensor
    time: Time
    place: tuple[str, str]


class HostCopies:
    """Asynchronous copies by the number of the host's memory: `leaving` are read by the device, `arriving` written."""

    def __init__(self) -> None:
        self.leaving: dict[int, Copy] = {}
        self.arriving: dict[int, Copy] = {}

    def __bool__(self) -> bool:
        return bool(self.leaving or self.arriving)

    def begin(self, memory: Tensor, time: Time, place: tuple[str, str], *, arrives: bool) -> None:
        copies = self.arriving if arrives else self.leaving
        copies[memory.untyped_storage()._cdata] = Copy(memory, time, place)

    def waited(self, host: Clock) -> None:
        for copies in (self.leaving, self.arriving):
            for number in [n for n, copy in copies.items() if copy.time[1] <= host.get(copy.time[0], 0)]:
                del copies[number]

    def touched(self, reads: Iterable[int], writes: Iterable[int]) -> str | None:
        reads, writes = set(reads), set(writes)
        if not self.arriving.keys().isdisjoint(reads | writes):
            return "the host uses what a copy to it may not have brought yet"
        if not self.leaving.keys().isdisjoint(writes):
            return "the host writes what a copy to the device may not have read yet"
        return None
