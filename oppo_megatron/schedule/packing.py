from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count

import numpy as np

from oppo_megatron.columns import Ints


def pack_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of at most `budget` tokens, by first-fit decreasing; longer sequences are alone."""
    order, bins = _first_fit(np.asarray(lengths, dtype=np.int64), budget)
    return [own.tolist() for own in _split(order, bins)]


def packed_in_order(lengths: Ints, budget: int) -> list[Ints]:
    order, bins = _first_fit(lengths, budget)
    by_index = np.empty_like(bins)
    by_index[order] = bins
    return _split(np.arange(len(order)), by_index)


def _split(items: Ints, bins: Ints) -> list[Ints]:
    if not len(items):
        return []
    return np.split(items[np.argsort(bins, kind="stable")], np.cumsum(np.bincount(bins))[:-1])


def _first_fit(lengths: Ints, budget: int) -> tuple[Ints, Ints]:
    """Indices, longest first, and their bins."""
    assert budget >= 1, f"the token budget of a micro-batch must be at least 1, not {budget}"
    order = np.argsort(-lengths, kind="stable")  # ties by index
    values, counts = np.unique(-lengths, return_counts=True)
    rooms, used = np.full(len(lengths), budget), 0
    filled, numbers = list[int](), list[int]()  # bins in the order of the items, and how many each gets
    for length, left in zip((-values).tolist(), counts.tolist(), strict=True):
        for found in chain(np.flatnonzero(rooms[:used] >= length).tolist(), count(used)):
            fitting = min(left, max(1, int(rooms[found]) // length)) if length else left
            filled.append(found)
            numbers.append(fitting)
            rooms[found] -= fitting * length
            used, left = max(used, found + 1), left - fitting
            if not left:
                break
    return order, np.repeat(np.array(filled, dtype=np.int64), numbers)


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


def dealt(parts: Ints, slots: int, arrivals: Ints, most: int) -> Ints:
    """Return the replica of each arriving group, [groups]: with slots for `most` sequences the one with the fewest tokens (ties:
    sequences), else a least crowded one. `parts` [3, replicas] and `arrivals` [3, groups]: tokens, sequences, unfinished
    sequences.
    """
    if parts.shape[1] == 1:
        return np.zeros(arrivals.shape[1], dtype=np.int64)
    found = _to_those_with_slots(parts, slots, arrivals, most)
    held = parts.T.copy()
    np.add.at(held, found, arrivals.T[: len(found)])
    for arrival in arrivals.T[len(found) :]:
        tokens, sequences, unfinished = held.T
        crowded = np.maximum(0, unfinished + arrival[2] - slots), np.maximum(0, sequences + arrival[1] - slots)
        found.append(int(np.lexsort((sequences, tokens, crowded[1], crowded[0]))[0]))
        held[found[-1]] += arrival
    return np.array(found, dtype=np.int64)


def _to_those_with_slots(parts: Ints, slots: int, arrivals: Ints, most: int) -> list[int]:
    found, free = list[int](), (slots - most - parts[1]).tolist()  # room beyond another group
    loads = zip(parts[0].tolist(), parts[1].tolist(), range(len(free)), strict=True)
    heap = [(tokens, sequences, replica) for tokens, sequences, replica in loads if free[replica] >= 0]
    heapq.heapify(heap)
    for more_tokens, more in arrivals[:2].T.tolist():
        if not heap:
            break
        tokens, sequences, replica = heap[0]
        found.append(replica)
        free[replica] -= more
        if free[replica] >= 0:
            heapq.heapreplace(heap, (tokens + more_tokens, sequences + more, replica))
        else:
            heapq.heappop(heap)
    return found


@dataclass(frozen=True, slots=True)
class Packing:
    """Tokens of a step: real ones, `room` for them in its micro-batches, `padded` if all rows were as long as the longest."""

    tokens: int
    room: int
    padded: int

    @classmethod
    def of(cls, parts: Sequence[Sequence[int]], budget: int) -> Packing:
        lengths = [length for part in parts for length in part]
        bins = [[part[i] for i in index] for part in parts for index in pack_by_tokens(part, budget)]
        room = sum(max(budget, sum(held)) for held in bins)
        return cls(sum(lengths), room, len(lengths) * max(lengths, default=0))


PACKING = ("packing_efficiency", "padding_saved")


def packing_figures(steps: Sequence[Packing]) -> dict[str, float]:
    tokens = sum(step.tokens for step in steps)
    numbers = tokens / sum(step.room for step in steps), 1 - tokens / sum(step.padded for step in steps)
    return dict(zip(PACKING, numbers, strict=True))
