"""CUDA streams by vector clocks (a time: number of operations started on a stream): which are surely done before another begins.
A clock holds, for each stream, the time that its next operation comes after; the host's is part of every operation it starts."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

Clock = dict[int, int]


def merge(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        into[stream] = max(time, into.get(stream, 0))


@dataclass
class Uses:
    """The last write of a memory, (stream, time), the last read on each stream, and the stream that it was made on."""

    written: tuple[int, int] | None = None
    read: Clock = field(default_factory=dict)
    made_on: int = 0


class Streams:
    def __init__(self) -> None:
        self.host: Clock = {}
        self.clocks: list[Clock] = []
        self.uses: dict[int, Uses] = {}
        self.freed: list[Clock] = []
        self.default, self._here = self.new(), threading.local()

    @property
    def current(self) -> int:
        """Return the present stream of this thread."""
        return getattr(self._here, "stream", self.default)

    @current.setter
    def current(self, stream: int) -> None:
        self._here.stream = stream

    def new(self) -> int:
        self.clocks.append({})
        self.freed.append({})
        return len(self.clocks) - 1

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(self, reads: Iterable[int], writes: Iterable[int], fresh: Iterable[int] = ()) -> str | None:
        """An operation starts on the current stream; what is wrong with it, if anything is.  `fresh` memories are new."""
        stream, clock = self.current, self.clocks[self.current]
        merge(clock, self.host)
        fresh, reads, writes = list(fresh), list(reads), list(writes)
        told = self._given_anew(clock) if fresh else None
        for memory in fresh:
            self.uses[memory] = Uses(made_on=stream)
        fault = told or next((told for m in reads if (told := self._unordered(m, clock, writes=False))), None)
        fault = fault or next((told for m in writes if (told := self._unordered(m, clock, writes=True))), None)
        time = clock[stream] = clock.get(stream, 0) + 1
        for memory in reads:
            self.uses.setdefault(memory, Uses()).read[stream] = time
        for memory in (*writes, *fresh):
            before = self.uses.get(memory)
            self.uses[memory] = Uses((stream, time), made_on=stream if before is None else before.made_on)
        return fault

    def free(self, memory: int) -> None:
        """Nobody holds the memory any longer.  torch gives it to whatever the stream that it was made on makes next."""
        uses = self.uses.pop(memory, None)
        if uses is not None:
            merge(self.freed[uses.made_on], uses.read)
            if uses.written is not None:
                merge(self.freed[uses.made_on], dict([uses.written]))

    def _given_anew(self, clock: Clock) -> str | None:
        """The current stream gets new memory, which may be any that was freed there."""
        freed, self.freed[self.current] = self.freed[self.current], {}
        if all(time <= clock.get(stream, 0) for stream, time in freed.items() if stream != self.current):
            return None
        return "gets memory that was freed while another stream may still use it"

    def _unordered(self, memory: int, clock: Clock, *, writes: bool) -> str | None:
        uses = self.uses.get(memory)
        if uses is None:
            return None
        if uses.written is not None and uses.written[1] > clock.get(uses.written[0], 0):
            return f"{'writes' if writes else 'reads'} what another stream has written, without a wait between"
        if writes and any(time > clock.get(stream, 0) for stream, time in uses.read.items()):
            return "writes what another stream still reads, without a wait between"
        return None

    def wait_for(self, clock: Clock) -> None:
        merge(self.host, clock)

    def wait_for_all(self) -> None:
        for clock in self.clocks:
            merge(self.host, clock)


class Copy(NamedTuple):
    """`memory` is held, so that no other has its number meanwhile; `time`: (stream, time)."""

    memory: Tensor
    time: tuple[int, int]
    place: tuple[str, str]


class HostCopies:
    """Copies under way by the host's memory, which it may not touch before it has waited; the device reads what is `leaving`."""

    def __init__(self) -> None:
        self.leaving: dict[int, Copy] = {}
        self.arriving: dict[int, Copy] = {}

    def __bool__(self) -> bool:
        return bool(self.leaving or self.arriving)

    def begin(self, memory: Tensor, time: tuple[int, int], place: tuple[str, str], *, arrives: bool) -> None:
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
