"""Each sequence's replica of a role.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np

from oppo_megatron.columns import Bools, Columns, Ints, columns_of
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.planning.ledger import ABSENT, Ledger

Pairs = list[tuple[int, int]]
"""A mapping of numbers as JSON keeps it: keys stay numbers, and their order stays."""

REPLICA = "replica"


class Replicas:
    """Each sequence's replica, where it stays until it leaves.  `slots`: the number of slots of one replica's cache.

    Of sequences in groups, `group_size` with neighbouring ids, a group has one replica, and no more than `most` of a group
    are placed (None: all).
    `ledger` has the replicas in its column REPLICA, and what else a book keeps of its sequences (`columns`).
    """

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
        """The sequence's replica, which it was given by `place`."""
        return int(self.ledger[REPLICA][self.ledger.row(seq_id)])

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self.ledger

    def place(self, held: Sequence[Rollout] | Columns, among: Bools | None = None) -> None:
        """Give a replica to each of `held` that has none; `held` are all that the replicas have to do with now, or those of
        them where `among` [n] says so.

        One of a group that has a replica follows it.  Of the other groups the longest first (ties: the first of `held`), each
        to the replica that holds the fewest tokens, prompts and responses so far (ties: the fewest sequences, then the
        first), among those that have slots for it: beyond this round, in which finished sequences still have theirs, and
        in this round.  Where none has, to one of the least crowded.
        """
        columns = columns_of(held)
        rows = self.ledger.rows(columns.seq_ids)
        homeless = self.ledger[REPLICA][rows] == ABSENT
        if not (homeless if among is None else homeless & among).any():
            return
        if among is not None:
            columns, rows = columns.at(among), rows[among]
        if self._group_size > 1:
            self._follow(columns.seq_ids, rows)
        homes = self.ledger[REPLICA][rows]
        new = np.flatnonzero(homes == ABSENT)
        arrived = columns.at(new)
        _, first, group = np.unique(arrived.seq_ids // self._group_size, return_index=True, return_inverse=True)
        tokens, unfinished = (
            np.bincount(group, weights).astype(np.int64) for weights in (arrived.num_tokens, ~arrived.finished)
        )
        order = np.lexsort((first, -tokens))
        arrivals = [column[order].tolist() for column in (tokens, np.bincount(group), unfinished)]
        parts = self._parts(columns.at(homes != ABSENT), homes[homes != ABSENT])
        found = np.empty_like(first)
        found[order] = _dealt(parts, list(zip(*arrivals, strict=True)), self._most)
        self.ledger[REPLICA][rows[new]] = found[group]

    def _follow(self, seq_ids: Ints, rows: Ints) -> None:
        """Those without a replica go where others of their group are."""
        homes = self.ledger[REPLICA]
        placed = np.flatnonzero(homes != ABSENT)
        groups, first = np.unique(self.ledger.ids(placed) // self._group_size, return_index=True)
        own = seq_ids // self._group_size
        at = np.searchsorted(groups, own)
        at[at == len(groups)] = 0
        follows = (homes[rows] == ABSENT) & (groups[at] == own) if len(groups) else np.zeros(len(rows), dtype=np.bool_)
        homes[rows[follows]] = homes[placed[first[at[follows]]]]

    def remove(self, *seq_ids: int) -> None:
        """The sequences have left."""
        self.ledger[REPLICA][self.ledger.rows(np.array(seq_ids, dtype=np.int64))] = ABSENT

    def state_dict(self) -> Pairs:
        """[sequence, replica] of each, in plain JSON types."""
        seq_ids = self.ledger.where(self.ledger[REPLICA] != ABSENT)
        return pairs_of(seq_ids, self.ledger[REPLICA][self.ledger.rows(seq_ids)])

    def load_state_dict(self, state: Pairs) -> None:
        self.ledger.clear()
        self.ledger.enter(REPLICA, state)

    def _parts(self, columns: Columns, homes: Ints) -> list[_Part]:
        """What each replica has of those that have one."""

        def by_replica(weights: Ints | None = None) -> list[int]:
            # As floats the sums of whole numbers are exact up to 2^53.
            sums: list[int] = np.bincount(homes, weights, self._num_replicas).astype(np.int64).tolist()
            return sums

        sums = by_replica(columns.num_tokens), by_replica(), by_replica((~columns.finished).astype(np.int64))
        return [_Part(replica, self._slots, *own) for replica, own in enumerate(zip(*sums, strict=True))]


@dataclass(slots=True)
class _Part:
    """What one replica holds."""

    replica: int
    slots: int
    tokens: int
    sequences: int
    unfinished: int

    def add(self, tokens: int, sequences: int, unfinished: int) -> None:
        self.tokens += tokens
        self.sequences += sequences
        self.unfinished += unfinished

    def rank_for(self, sequences: int, unfinished: int) -> tuple[int, ...]:
        """The replica with the smallest takes a group of so many."""
        crowded = max(0, self.unfinished + unfinished - self.slots), max(0, self.sequences + sequences - self.slots)
        return *crowded, self.tokens, self.sequences, self.replica


def _dealt(parts: Sequence[_Part], arrivals: Sequence[tuple[int, int, int]], group_size: int) -> list[int]:
    """The replicas of arriving groups (tokens, sequences, unfinished), in their order: each goes to the part whose
    `rank_for` is smallest.

    A part with slots for a whole group is not crowded by it, and one without is, as sequences are no fewer than those
    unfinished.  So the parts with slots come first, by tokens and sequences: a heap has what they have of both.  (Less than
    a whole group is dealt as if it were whole.)  One whole number has tokens, sequences and replica, in this order of weight:
    it is compared and added to faster than a tuple.
    """
    if len(parts) == 1:
        return [parts[0].replica] * len(arrivals)
    found: list[int] = []
    bits = len(parts).bit_length()
    mask = (1 << bits) - 1
    above = (sum(p.sequences for p in parts) + sum(sequences for _, sequences, _ in arrivals)).bit_length() + bits
    heap = [p.tokens << above | p.sequences << bits | p.replica for p in parts if p.sequences + group_size <= p.slots]
    heapify(heap)
    free = [p.slots - p.sequences - group_size for p in parts]  # sequences that leave room for another group
    for tokens, sequences, _ in arrivals if heap else ():
        first = heap[0]
        replica = first & mask
        found.append(replica)
        free[replica] -= sequences
        if free[replica] >= 0:
            heapreplace(heap, first + (tokens << above) + (sequences << bits))
        else:
            heappop(heap)
            if not heap:
                break
    rest = arrivals[len(found) :]
    if rest:
        for replica, arrival in zip(found, arrivals, strict=False):
            parts[replica].add(*arrival)
    for tokens, sequences, unfinished in rest:
        part = min(parts, key=lambda p: p.rank_for(sequences, unfinished))
        part.add(tokens, sequences, unfinished)
        found.append(part.replica)
    return found


def pairs_of(keys: Ints, values: Ints) -> Pairs:
    return list(zip(keys.tolist(), values.tolist(), strict=True))
