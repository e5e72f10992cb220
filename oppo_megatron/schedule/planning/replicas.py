"""Each sequence's replica of a role.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np

from oppo_megatron.columns import Columns, Ints, columns_of
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.planning.ledger import ABSENT, Ledger

Pairs = list[tuple[int, int]]
"""A mapping of numbers as JSON keeps it: keys stay numbers, and their order stays."""

REPLICA = "replica"


class Replicas:
    """Each sequence's replica, where it stays until it leaves.  `slots`: the number of slots of one replica's cache.

    `ledger` has the replicas in its column REPLICA, and what else a book keeps of its sequences (`columns`).
    """

    def __init__(self, num_replicas: int, slots: int, columns: Mapping[str, int] | None = None):
        self._num_replicas, self._slots = num_replicas, slots
        self.ledger = Ledger(REPLICA, {REPLICA: ABSENT} | dict(columns or {}))

    def of(self, seq_id: int) -> int:
        """The sequence's replica, which it was given by `place`."""
        return int(self.ledger[REPLICA][self.ledger.row(seq_id)])

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self.ledger

    def place(self, held: Sequence[Rollout] | Columns) -> None:
        """Give a replica to each of `held` that has none; `held` are all that the replicas have to do with now.

        The longest first (ties: the first of `held`), each to the replica that holds the fewest tokens, prompts and
        responses so far (ties: the fewest sequences, then the first), among those that have slots for it: beyond this
        round, in which finished sequences still have theirs, and in this round.  Where none has, to one of the least
        crowded.
        """
        columns = columns_of(held)
        rows = self.ledger.rows(columns.seq_ids)
        homes = self.ledger[REPLICA][rows]
        new = np.flatnonzero(homes == ABSENT)
        if not len(new):
            return
        lengths = columns.num_tokens[new]
        new = new[np.argsort(-lengths, kind="stable")]
        parts = self._parts(columns.at(homes != ABSENT), homes[homes != ABSENT])
        ended, tokens = columns.finished[new].tolist(), columns.num_tokens[new].tolist()
        self.ledger[REPLICA][rows[new]] = _dealt(parts, list(zip(tokens, ended, strict=True)))

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

    def add(self, tokens: int, finished: bool) -> None:
        self.tokens += tokens
        self.sequences += 1
        self.unfinished += not finished

    def rank_for(self, finished: bool) -> tuple[int, ...]:
        """The replica with the smallest takes the rollout."""
        staying = self.unfinished + (not finished)
        crowded = max(0, staying - self.slots), max(0, self.sequences + 1 - self.slots)
        return *crowded, self.tokens, self.sequences, self.replica


def _dealt(parts: Sequence[_Part], arrivals: Sequence[tuple[int, bool]]) -> list[int]:
    """The replicas of arrivals (tokens, finished), in their order: each goes to the part whose `rank_for` is smallest.

    A part with a slot left is not crowded by anything, and one without is by everything, as sequences are no fewer than
    those unfinished.  So the parts with slots come first, by tokens and sequences: a heap has what they have of both.
    """
    if len(parts) == 1:
        return [parts[0].replica] * len(arrivals)
    found: list[int] = []
    heap = [(p.tokens, p.sequences, p.replica) for p in parts if p.sequences < p.slots]
    heapify(heap)
    for tokens, _ in arrivals if heap else ():
        load, count, replica = heap[0]
        found.append(replica)
        if count + 1 < parts[replica].slots:
            heapreplace(heap, (load + tokens, count + 1, replica))
        else:
            heappop(heap)
            if not heap:
                break
    rest = arrivals[len(found) :]
    if rest:
        for replica, (tokens, finished) in zip(found, arrivals, strict=False):
            parts[replica].add(tokens, finished)
    for tokens, finished in rest:
        part = min(parts, key=lambda p: p.rank_for(finished))
        part.add(tokens, finished)
        found.append(part.replica)
    return found


def pairs_of(keys: Ints, values: Ints) -> Pairs:
    return list(zip(keys.tolist(), values.tolist(), strict=True))
