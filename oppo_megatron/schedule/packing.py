"""Packing of sequences into micro-batches of bounded token count."""

from __future__ import annotations

from collections.abc import Sequence


def pack_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of indices into `lengths` whose tokens sum to at most `budget`, by first-fit decreasing.

    Longest first, ties by index; every index is in exactly one bin.  A sequence longer than the budget has a bin of its
    own.
    First-fit decreasing needs at most 11/9 of the fewest possible bins, plus one.
    """
    assert budget >= 1, f"the token budget of a micro-batch must be at least 1, not {budget}"
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        fitting = next((b for b, load in enumerate(loads) if load + length <= budget), None)
        if fitting is None:
            bins.append([index])
            loads.append(length)
        else:
            bins[fitting].append(index)
            loads[fitting] += length
    return bins
