"""The free time of ranks, while a schedule is laid out.

Times are whole nanoseconds: sums of them are exact, so every rank that plans from the same costs finds the same gaps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

_FOREVER = 1 << 62


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class Gaps:
    """Gaps of each rank; the last one is endless.  Gaps shorter than `shortest`, which are useless, are forgotten."""

    def __init__(self, ranks: Sequence[int], shortest: int = 1):
        self._shortest = max(1, shortest)
        self._starts: dict[int, list[int]] = {rank: [0] for rank in ranks}
        self._ends: dict[int, list[int]] = {rank: [_FOREVER] for rank in ranks}

    def fit(self, ranks: Sequence[int], ready: int, duration: int) -> int:
        """The earliest time from `ready` on at which all `ranks` are free for `duration`."""
        if len(ranks) == 1:
            return self._fit_one(ranks[0], ready, duration)
        start = ready
        while True:
            found = start
            for rank in ranks:
                found = self._fit_one(rank, found, duration)
            if found == start:
                return start
            start = found

    def take(self, ranks: Sequence[int], start: int, duration: int) -> None:
        """Occupy `ranks` for `duration` from `start`, which `fit` found."""
        for rank in ranks:
            starts, ends = self._starts[rank], self._ends[rank]
            gap = bisect_right(starts, start) - 1
            first, last, end = starts[gap], ends[gap], start + duration
            assert first <= start and end <= last, f"rank {rank} is busy somewhere in {start} .. {end}"
            rest = [(a, b) for a, b in ((first, start), (end, last)) if b - a >= self._shortest]
            starts[gap : gap + 1] = [a for a, _ in rest]
            ends[gap : gap + 1] = [b for _, b in rest]

    def append(self, ranks: Sequence[int], start: int, duration: int) -> None:
        """`take`, where nothing is placed on any of `ranks` from `start` on."""
        for rank in ranks:
            starts, ends = self._starts[rank], self._ends[rank]
            assert starts[-1] <= start, f"rank {rank} is busy somewhere in {start} .. {start + duration}"
            if start - starts[-1] >= self._shortest:
                ends[-1] = start
                starts.append(start + duration)
                ends.append(_FOREVER)
            else:
                starts[-1] = start + duration

    def end(self, ranks: Sequence[int]) -> int:
        """The time from which nothing is placed on any of `ranks`."""
        return max(self._starts[rank][-1] for rank in ranks)

    def close(self) -> None:
        """Forget all gaps but the last: later actions are placed behind all present ones."""
        for rank in self._starts:
            del self._starts[rank][:-1], self._ends[rank][:-1]

    def _fit_one(self, rank: int, ready: int, duration: int) -> int:
        starts, ends = self._starts[rank], self._ends[rank]
        gap = bisect_left(ends, ready + duration)
        while max(starts[gap], ready) + duration > ends[gap]:
            gap += 1
        return max(starts[gap], ready)
