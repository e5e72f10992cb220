"""Which neighbouring sequences of a call attend together on a CPU, each as far as the longest of them.

What is read beyond the end of a shorter sequence is wasted; a call of its own has a cost of its own.  Sequences that joined
together are about as long as each other and lie side by side, so few cuts save most of the waste.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

CALL_NUMBERS = 2**16
"""Cached numbers that are read in the time that a call of attention takes beside reading."""


def stretches(lengths: Sequence[int], call: float) -> list[slice]:
    """Rows cut where that saves more positions than `call`, those that an attention call is worth; each cut at its best."""
    return [slice(first, end) for first, end in _cut(lengths, 0, len(lengths), call)]


def _cut(lengths: Sequence[int], first: int, end: int, call: float) -> list[tuple[int, int]]:
    rows = lengths[first:end]
    left, right = list(accumulate(rows, max)), list(accumulate(reversed(rows), max))[::-1]
    costs = [n * left[n - 1] + (len(rows) - n) * right[n] for n in range(1, len(rows))]
    if not costs or min(costs) + call >= len(rows) * left[-1]:
        return [(first, end)]
    middle = first + 1 + costs.index(min(costs))
    return [*_cut(lengths, first, middle, call), *_cut(lengths, middle, end, call)]
