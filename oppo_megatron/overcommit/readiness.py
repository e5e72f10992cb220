"""The decode step at which a batch is complete, and its groups ("A bound on staleness", docs/algorithm.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

import numpy as np

from oppo_megatron.columns import Bools, Ints


class Readiness:
    """The engine stops when `ready`, so batches do not depend on the chunk size."""

    def __init__(
        self,
        target: int,
        num_finished: int,
        unfinished: Set[int],
        waits: Iterable[tuple[Iterable[int], int]] = (),
        group_size: int = 1,
    ):
        """`waits`: (sequences, how many of their groups must finish first); `target` and `num_finished` count groups."""
        self._num_missing = target - num_finished
        self._unfinished = unfinished
        self._ended: set[int] = set()
        self._waits = [(frozenset(sequences), number) for sequences, number in waits]
        self._group_size = group_size

    @property
    def ready(self) -> bool:
        return self._num_missing <= 0 and not self._waits

    @property
    def least(self) -> int:
        return max(self._num_missing, *(number for _, number in self._waits), 0)

    def finish(self, *seq_ids: int) -> None:
        ended = set(seq_ids)
        decoded = len(ended) == len(seq_ids) and self._ended.isdisjoint(ended) and self._unfinished >= ended
        self._ended |= ended
        assert decoded, f"of sequence {', '.join(map(str, seq_ids))} one is not decoded in this step or has already finished"
        if self._group_size == 1 and not self._waits:
            self._num_missing -= len(seq_ids)
            return
        whole = self._last_of_groups(set(seq_ids))
        self._num_missing -= len(whole)
        if self._waits:
            left = [(sequences, number - len(whole & sequences)) for sequences, number in self._waits]
            self._waits = [wait for wait in left if wait[1] > 0]

    def _last_of_groups(self, ended: set[int]) -> set[int]:
        if self._group_size == 1:
            return ended
        one_of_each = {seq_id // self._group_size: seq_id for seq_id in ended}
        return set(filter(self._was_last, one_of_each.values()))

    def _was_last(self, seq_id: int) -> bool:
        first = seq_id - seq_id % self._group_size
        return all(i in self._ended for i in range(first, first + self._group_size) if i in self._unfinished)


class JudgedReadiness(Readiness):
    """With a filter only verdicts, between rounds, complete a batch."""

    def finish(self, *seq_ids: int) -> None:
        pass


def due(ages_G: Ints, batch: int, most: int) -> Iterator[tuple[Bools, int]]:
    """Yield (S_k, r_k) for each k with r_k > 0, oldest first; `most` is η."""
    for k in range(min(most, len(ages_G) // batch) + 1):
        members_G = ages_G >= most - k
        needed = int(members_G.sum()) - k * batch
        if needed > 0:
            yield members_G, needed


def settled(finished_G: Bools, clocks_G: Ints, ages_G: Ints, batch: int, most: int, target: int) -> Ints:
    """Return the groups that the next batch will have, whatever is decoded next.

    These are the oldest, finished or not; the first finishers of each S_k up to r_k; then of all groups, in places not reserved.
    """
    finishers = np.flatnonzero(finished_G)
    chosen_G, reserved = ages_G >= most, 0
    if chosen_G.sum() > target:  # possible after settings changed: the first admitted
        return np.flatnonzero(chosen_G)[:target]
    for members_G, needed in due(ages_G, batch, most):
        missing = needed - int((chosen_G & members_G).sum()) - reserved  # reserved ones of an older class are members, too
        room = target - int(chosen_G.sum()) - reserved
        first = _first(finishers[(members_G & ~chosen_G)[finishers]], clocks_G, min(missing, room))
        chosen_G[first] = True
        reserved += max(0, missing - len(first))
    places = target - int(chosen_G.sum()) - reserved
    chosen_G[_first(finishers[~chosen_G[finishers]], clocks_G, places)] = True
    return np.flatnonzero(chosen_G)


def _first(groups: Ints, clocks_G: Ints, number: int) -> Ints:
    if len(groups) <= max(0, number):
        return groups
    return groups[np.argsort(clocks_G[groups], kind="stable")][: max(0, number)]


def needed_batch(ages: Ints, most: int) -> int:
    """Smallest B that trains groups of these ages in time: |S_k| <= (k + 1) B for each k."""
    return max((-(-int((ages >= most - k).sum()) // (k + 1)) for k in range(most + 1)), default=0)
