"""Pack sequences into micro-batches, and divide them among replicas."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from oppo_megatron.columns import Ints


def pack_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of at most `budget` tokens, by first-fit decreasing; longer sequences are alone."""
    order, bins = _first_fit(np.asarray(lengths, dtype=np.int64), budget)
    members = order[np.argsort(bins, kind="stable")].tolist()
    return [members[start:end] for start, end in pairwise(_ends(bins))]


def packed_in_order(lengths: Ints, budget: int) -> tuple[Ints, list[int]]:
    """Return the same bins concatenated, each ascending, and their ends, from 0."""
    order, bins = _first_fit(lengths, budget)
    by_index = np.empty_like(bins)
    by_index[order] = bins
    return np.argsort(by_index, kind="stable"), _ends(bins)


def _first_fit(lengths: Ints, budget: int) -> tuple[Ints, Ints]:
    """Indices, longest first, and their bins."""
    assert budget >= 1, f"the token budget of a micro-batch must be at least 1, not {budget}"
    order = np.argsort(-lengths, kind="stable")  # ties by index
    ordered = lengths[order]
    edges = np.array([0, *(np.flatnonzero(np.diff(ordered)) + 1), len(ordered)]) if len(ordered) else np.zeros(1, dtype=np.int64)
    shortest, rooms = int(lengths.min(initial=budget)), list[int]()
    open_bins: list[int] = []  # those with room for anything
    filled, numbers = list[int](), list[int]()  # bins in the order of the items, and how many each gets
    for length, count in zip(ordered[edges[:-1]].tolist(), np.diff(edges).tolist(), strict=True):
        full = False
        # Items of one length fill a bin as far as they fit before the next bin gets any.
        for b in open_bins:
            room = rooms[b]
            if room < length:
                continue
            fitting = min(room // length, count) if length else count
            filled.append(b)
            numbers.append(fitting)
            rooms[b] = room - fitting * length
            full = full or rooms[b] < shortest
            count -= fitting
            if not count:
                break
        if count:
            each = max(1, budget // length if length else count)
            whole, rest = divmod(count, each)
            new = [each] * whole + [rest] * (rest > 0)
            filled += range(len(rooms), len(rooms) + len(new))
            open_bins += range(len(rooms), len(rooms) + len(new))
            numbers += new
            rooms += [budget - number * length for number in new]
            full = full or rooms[-len(new)] < shortest
        if full:
            open_bins = [b for b in open_bins if rooms[b] >= shortest]
    return order, np.repeat(np.array(filled, dtype=np.int64), numbers)


def _ends(bins: Ints) -> list[int]:
    return [0, *np.cumsum(np.bincount(bins)).tolist()]


def balance(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divide indices into ascending parts, longest first: largest sum at most 4/3 of the best (Graham 1969)."""
    assert num_parts >= 1, f"a batch is divided into at least 1 part, not {num_parts}"
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, 0, part) for part in range(num_parts)]  # tokens, items, part: a heap
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, items, part = loads[0]
        parts[part].append(index)
        heapq.heapreplace(loads, (tokens + lengths[index], items + 1, part))
    return [sorted(part) for part in parts]


@dataclass(frozen=True, slots=True)
class Packing:
    """Tokens of an optimizer step; `room`: capacity of its micro-batches, `padded`: with rows padded to the longest."""

    tokens: int
    room: int
    padded: int

    @classmethod
    def of(cls, parts: Sequence[Sequence[int]], budget: int) -> Packing:
        lengths = [length for part in parts for length in part]
        bins = [[part[i] for i in index] for part in parts for index in pack_by_tokens(part, budget)]
        room = sum(max(budget, sum(held)) for held in bins)
        return cls(sum(lengths), room, len(lengths) * max(lengths, default=0))


def packing_figures(steps: Sequence[Packing]) -> dict[str, float]:
    tokens = sum(step.tokens for step in steps)
    return {
        "packing_efficiency": tokens / sum(step.room for step in steps),
        "padding_saved": 1 - tokens / sum(step.padded for step in steps),
    }
