"""Free time of ranks, in nanoseconds so that all ranks agree."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from oppo_megatron.columns import Ints

FOREVER = 1 << 62


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def in_nanoseconds(seconds: npt.NDArray[np.float64]) -> Ints:
    return np.rint(seconds * 1e9).astype(np.int64)


class Gaps:
    """Gaps of each rank, the last endless, none shorter than `shortest`."""

    def __init__(self, ranks: Sequence[int], shortest: int = 1):
        self._shortest = max(1, shortest)
        self._starts: dict[int, list[int]] = {rank: [0] for rank in ranks}
        self._ends: dict[int, list[int]] = {rank: [FOREVER] for rank in ranks}

    def place(self, ranks: Sequence[int], ready: int, duration: int) -> int:
        """Occupy all `ranks` at the earliest common time from `ready`. Returns the start."""
        start = self._fit(ranks[0], ready, duration)
        while len(ranks) > 1 and (later := max(self._fit(rank, start, duration) for rank in ranks)) > start:
            start = later
        for rank in ranks:
            self._take(rank, start, start + duration)
        return start

    def append(self, ranks: Sequence[int], starts: Ints, ends: Ints) -> None:
        for rank in ranks:
            begins = np.concatenate([self._starts[rank][-1:], ends[:-1]])
            assert (begins <= starts).all(), f"rank {rank} is busy somewhere in {starts[0]} .. {ends[-1]}"
            left = starts - begins >= self._shortest
            self._starts[rank][-1:] = [*begins[left].tolist(), int(ends[-1])]
            self._ends[rank][-1:] = [*starts[left].tolist(), FOREVER]

    def end(self, ranks: Sequence[int]) -> int:
        return max(self._starts[rank][-1] for rank in ranks)

    def close(self) -> None:
        for rank in self._starts:
            del self._starts[rank][:-1], self._ends[rank][:-1]

    def _fit(self, rank: int, ready: int, duration: int) -> int:
        starts, ends = self._starts[rank], self._ends[rank]
        gap = bisect_left(ends, ready + duration)
        while max(ready, starts[gap]) + duration > ends[gap]:
            gap += 1
        return max(ready, starts[gap])

    def _take(self, rank: int, start: int, end: int) -> None:
        starts, ends = self._starts[rank], self._ends[rank]
        gap = bisect_right(starts, start) - 1
        first, last = starts[gap], ends[gap]
        assert first <= start and end <= last, f"rank {rank} is busy somewhere in {start} .. {end}"
        left = [(a, b) for a, b in ((first, start), (end, last)) if b - a >= self._shortest]
        starts[gap : gap + 1] = [a for a, _ in left]
        ends[gap : gap + 1] = [b for _, b in left]
