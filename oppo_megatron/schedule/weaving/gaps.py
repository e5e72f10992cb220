"""Free time of ranks while a schedule is laid out, in nanoseconds, so that all ranks agree."""

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
    """Gaps of each rank, the last endless, without those shorter than `shortest`."""

    def __init__(self, ranks: Sequence[int], shortest: int = 1):
        self._shortest = max(1, shortest)
        self._starts: dict[int, list[int]] = {rank: [0] for rank in ranks}
        self._ends: dict[int, list[int]] = {rank: [FOREVER] for rank in ranks}

    def place(self, ranks: Sequence[int], ready: int, duration: int) -> int:
        """Occupy all `ranks` at the earliest common time from `ready`. Returns the start."""
        if len(ranks) == 1:
            gap, start = self._fit_one(ranks[0], ready, duration)
            self._take(ranks[0], gap, start, start + duration)
            return start
        start = self._fit(ranks, ready, duration)
        for rank in ranks:
            self._take(rank, bisect_right(self._starts[rank], start) - 1, start, start + duration)
        return start

    def fill(self, ranks: Sequence[int], ready: Ints, durations: Ints, lines: Sequence[int]) -> Ints:
        """`place` n actions in turn, each after the previous one of its line. Returns the starts, [n]."""
        ends, last = [0] * (max(lines, default=0) + 1), self.last(ranks)
        behind = _behind(last, ready, durations)
        found = self._one_by_one(ranks, ready[:behind], durations[:behind], lines, ends) if behind else []
        left = self.last(ranks)
        if left > last and _behind(left, ready[behind:], durations[behind:]):  # a gap has been left meanwhile
            found += self._one_by_one(ranks, ready[behind:], durations[behind:], lines[behind:], ends)
        elif behind < len(lines):
            rest = durations[behind:]
            before = np.cumsum(rest) - rest
            starts = before + np.maximum.accumulate(np.maximum(ready[behind:], self.end(ranks)) - before)
            self.append(ranks, starts, starts + rest)
            found += starts.tolist()
        return np.array(found, dtype=np.int64)

    def last(self, ranks: Sequence[int]) -> int:
        return max((self._ends[rank][-2] for rank in ranks if len(self._ends[rank]) > 1), default=0)

    def _one_by_one(self, ranks: Sequence[int], ready: Ints, durations: Ints, lines: Sequence[int], ends: list[int]) -> list[int]:
        if len(ranks) == 1:
            return self._on_one_rank(ranks[0], ready.tolist(), durations.tolist(), lines, ends)
        found, place = list[int](), self.place
        for earliest, duration, line in zip(ready.tolist(), durations.tolist(), lines, strict=False):
            before = ends[line]
            start = place(ranks, earliest if earliest > before else before, duration)
            ends[line] = start + duration
            found.append(start)
        return found

    def _on_one_rank(
        self, rank: int, ready: Sequence[int], durations: Sequence[int], lines: Sequence[int], ends: list[int]
    ) -> list[int]:
        """`_one_by_one` with calls inlined for speed."""
        begins, closes, shortest, found = self._starts[rank], self._ends[rank], self._shortest, list[int]()
        for start, duration, line in zip(ready, durations, lines, strict=False):
            if start < ends[line]:
                start = ends[line]
            end = start + duration
            gap = bisect_left(closes, end)
            first = begins[gap]
            while first > start and first + duration > closes[gap]:
                gap += 1
                first = begins[gap]
            if first > start:
                start, end = first, first + duration
            ends[line] = end
            found.append(start)
            last = closes[gap]
            if start - first >= shortest:
                closes[gap] = start
                if last - end >= shortest:
                    begins.insert(gap + 1, end)
                    closes.insert(gap + 1, last)
            elif last - end >= shortest:
                begins[gap] = end
            else:
                del begins[gap], closes[gap]
        return found

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

    def _fit(self, ranks: Sequence[int], ready: int, duration: int) -> int:
        start = ready
        while True:
            found = start
            for rank in ranks:
                _, found = self._fit_one(rank, found, duration)
            if found == start:
                return start
            start = found

    def _fit_one(self, rank: int, ready: int, duration: int) -> tuple[int, int]:
        starts, ends = self._starts[rank], self._ends[rank]
        gap = bisect_left(ends, ready + duration)
        start = starts[gap]
        while (start if start > ready else ready) + duration > ends[gap]:
            gap += 1
            start = starts[gap]
        return gap, start if start > ready else ready

    def _take(self, rank: int, gap: int, start: int, end: int) -> None:
        starts, ends = self._starts[rank], self._ends[rank]
        first, last = starts[gap], ends[gap]
        assert first <= start and end <= last, f"rank {rank} is busy somewhere in {start} .. {end}"
        if start - first < self._shortest:
            if last - end >= self._shortest:
                starts[gap] = end
            else:
                del starts[gap], ends[gap]
        else:
            ends[gap] = start
            if last - end >= self._shortest:
                starts.insert(gap + 1, end)
                ends.insert(gap + 1, last)


def _behind(last: int, ready: Ints, durations: Ints) -> int:
    """Return the index from which all actions end after `last` and are ready in order."""
    early = (ready + durations <= last) | (durations <= 0)
    early[:-1] |= ready[1:] < ready[:-1]
    found = np.flatnonzero(early)
    return int(found[-1]) + 1 if len(found) else 0
