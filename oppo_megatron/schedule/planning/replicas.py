"""Assign each sequence of a role to a replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np

from oppo_megatron.columns import Columns, Ints, columns_of
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.planning.ledger import ABSENT, Ledger, Memo, Pairs

REPLICA = "replica"

BLOCK = 512
"""Arrivals assigned between two checks for free slots."""


class Replicas:
    """Replicas of sequences, fixed until they leave; at most `most` of `group_size` neighbouring ids are assigned."""

    def __init__(
        self,
        num_replicas: int,
        slots: int,
        columns: Mapping[str, int] | None = None,
        group_size: int = 1,
        most: int | None = None,
        memo: Memo | None = None,
    ):
        self._num_replicas, self._slots, self._group_size = num_replicas, slots, group_size
        self._most = group_size if most is None else most
        self._memo = memo or Memo()
        self.ledger = Ledger(REPLICA, {REPLICA: ABSENT} | dict(columns or {}))

    def of(self, seq_id: int) -> int:
        return int(self.ledger[REPLICA][self.ledger.row(seq_id)])

    def place(self, held: Sequence[Rollout] | Columns) -> Ints:
        """Assign a replica to each of `held` (all present sequences) that has none. Returns all replicas.

        New groups, longest first, go to the replica with the fewest tokens (ties: sequences) with slots now and after the round;
        else to a least crowded one.
        """
        columns = columns_of(held)
        rows = self.ledger.rows(columns.seq_ids)
        homes = self.ledger[REPLICA][rows]
        if not (homes == ABSENT).any():
            return homes
        if self._group_size > 1:
            self._follow(columns.seq_ids, rows)
            homes = self.ledger[REPLICA][rows]
        new, known = np.flatnonzero(homes == ABSENT), np.flatnonzero(homes != ABSENT)
        arrived = columns.at(new)
        group, arrivals = self._arrivals(arrived)
        order = np.argsort(-arrivals[0], kind="stable")  # ties: the first of `held`
        found = np.empty_like(order)
        found[order] = self._dealt(columns.at(known), homes[known], arrivals[:, order])
        self.ledger[REPLICA][rows[new]] = found if group is None else found[group]
        return self.ledger[REPLICA][rows]

    def _arrivals(self, arrived: Columns) -> tuple[Ints | None, Ints]:
        """Return each arrival's group (None: one each), and tokens, sequences, unfinished ones of groups, [3, groups]."""
        weights = arrived.num_tokens, np.ones_like(arrived.seq_ids), (~arrived.finished).astype(np.int64)
        if self._group_size == 1:
            return None, np.stack(weights)
        _, first, inverse = np.unique(arrived.seq_ids // self._group_size, return_index=True, return_inverse=True)
        place = np.empty_like(first)
        place[np.argsort(first)] = np.arange(len(first))
        group: Ints = place[inverse]
        return group, np.stack([np.bincount(group, each).astype(np.int64) for each in weights])

    def _follow(self, seq_ids: Ints, rows: Ints) -> None:
        homes = self.ledger[REPLICA]
        placed = np.flatnonzero(homes != ABSENT)
        groups, first = np.unique(self.ledger.ids(placed) // self._group_size, return_index=True)
        own = seq_ids // self._group_size
        at = np.searchsorted(groups, own)
        at[at == len(groups)] = 0
        follows = (homes[rows] == ABSENT) & (groups[at] == own) if len(groups) else np.zeros(len(rows), dtype=np.bool_)
        homes[rows[follows]] = homes[placed[first[at[follows]]]]

    def state_dict(self) -> Pairs:
        return self.ledger.pairs(REPLICA, self.ledger[REPLICA] != ABSENT)

    def load_state_dict(self, state: Pairs) -> None:
        self.ledger.clear()
        self.ledger.enter(REPLICA, state)

    def _dealt(self, known: Columns, homes: Ints, arrivals: Ints) -> Ints:
        def by_replica(weights: Ints | None = None) -> Ints:
            # Float sums of integers are exact up to 2^53.
            return np.bincount(homes, weights, self._num_replicas).astype(np.int64)

        parts = np.stack([by_replica(known.num_tokens), by_replica(), by_replica((~known.finished).astype(np.int64))])
        return self._memo.once(dealt, parts, self._slots, arrivals, self._most)


def dealt(parts: Ints, slots: int, arrivals: Ints, most: int) -> Ints:
    """`parts` [3, replicas] and `arrivals` [3, groups]: tokens, sequences, unfinished sequences."""
    if parts.shape[1] == 1:
        return np.zeros(arrivals.shape[1], dtype=np.int64)
    found = _to_those_with_slots(parts, slots, arrivals, most)
    held = [list(own) for own in zip(*parts.tolist(), strict=True)]
    rest = list(zip(*arrivals[:, len(found) :].tolist(), strict=True))
    if rest:
        for column, weights in enumerate(arrivals[:, : len(found)]):
            for part, more in zip(held, np.bincount(found, weights, len(held)).astype(np.int64).tolist(), strict=True):
                part[column] += more
    others = list[int]()
    for arrival in rest:
        others.append(min(range(len(held)), key=lambda d: _rank_for(held[d], d, slots, arrival)))
        held[others[-1]] = [own + more for own, more in zip(held[others[-1]], arrival, strict=True)]
    return np.append(found, others).astype(np.int64)


def _rank_for(part: Sequence[int], replica: int, slots: int, arrival: Sequence[int]) -> tuple[int, ...]:
    (tokens, sequences, unfinished), (_, more, more_unfinished) = part, arrival
    crowded = max(0, unfinished + more_unfinished - slots), max(0, sequences + more - slots)
    return *crowded, tokens, sequences, replica


def _to_those_with_slots(parts: Ints, slots: int, arrivals: Ints, most: int) -> Ints:
    """Return the replicas of the first arrivals, as long as one has slots for a group.

    Integers in the heap (tokens, sequences, replica as bits) are faster than tuples.
    """
    replicas, bits = parts.shape[1], parts.shape[1].bit_length()
    above, mask = int(parts[1].sum() + arrivals[1].sum()).bit_length() + bits, (1 << bits) - 1
    assert int(parts[0].sum() + arrivals[0].sum()).bit_length() + above < 63, "too many tokens for a whole number"
    adds = ((arrivals[0] << above) + (arrivals[1] << bits)).tolist()
    left = slots - most - parts[1]  # room beyond another group
    open_parts = np.flatnonzero(left >= 0)
    heap = ((parts[0] << above) + (parts[1] << bits) + np.arange(replicas))[open_parts].tolist()
    heapify(heap)
    found = list[Ints]()
    for start in range(0, len(adds), BLOCK):
        block, sequences = adds[start : start + BLOCK], arrivals[1, start : start + BLOCK]
        if not heap:
            break
        tried = list(heap)
        given = np.array([heapreplace(tried, tried[0] + add) for add in block], dtype=np.int64) & mask
        after = left - np.bincount(given, sequences, replicas).astype(np.int64)
        if (after[given] >= 0).all():
            heap, left = tried, after
        else:
            given = _one_by_one(heap, left, block, sequences.tolist(), mask)
        found.append(given)
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def _one_by_one(heap: list[int], left: Ints, adds: Sequence[int], sequences: Sequence[int], mask: int) -> Ints:
    found, free = list[int](), left.tolist()
    for add, number in zip(adds, sequences, strict=True):
        if not heap:
            break
        first = heap[0]
        replica = first & mask
        found.append(replica)
        free[replica] -= number
        if free[replica] >= 0:
            heapreplace(heap, first + add)
        else:
            heappop(heap)
    left[:] = free
    return np.array(found, dtype=np.int64)
