"""Assign each sequence of a role to a replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np

from oppo_megatron.columns import Columns, Ints, columns_of
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.planning.ledger import ABSENT, Ledger, Pairs

REPLICA = "replica"


class Replicas:
    """Replicas of sequences, fixed until they leave; at most `most` of `group_size` neighbouring ids are assigned."""

    def __init__(
        self,
        num_replicas: int,
        slots: int,
        columns: Mapping[str, int] | None = None,
        group_size: int = 1,
        most: int | None = None,
    ):
        self._num_replicas, self._slots, self._group_size = num_replicas, slots, group_size
        self._most = group_size if most is None else most
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
        return dealt(parts, self._slots, arrivals, self._most)


def dealt(parts: Ints, slots: int, arrivals: Ints, most: int) -> Ints:
    """`parts` [3, replicas] and `arrivals` [3, groups]: tokens, sequences, unfinished sequences."""
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
    """Return the replicas of the first arrivals, as long as one has slots for a group of `most`."""
    found, free = list[int](), (slots - most - parts[1]).tolist()  # room beyond another group
    loads = zip(parts[0].tolist(), parts[1].tolist(), range(len(free)), strict=True)
    heap = [(tokens, sequences, replica) for tokens, sequences, replica in loads if free[replica] >= 0]
    heapify(heap)
    for more_tokens, more in arrivals[:2].T.tolist():
        if not heap:
            break
        tokens, sequences, replica = heap[0]
        found.append(replica)
        free[replica] -= more
        if free[replica] >= 0:
            heapreplace(heap, (tokens + more_tokens, sequences + more, replica))
        else:
            heappop(heap)
    return found
