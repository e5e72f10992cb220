"""Cached and computed tokens of every rollout in a role, the same on all ranks that plan a round.  Pure.

A book assigns sequences to replicas and cache slots, and plans the growth of each micro-batch; the caches follow it. Every rank
keeps the books of all replicas, in arrays over all sequences, because all reach the same numbers from the same chunks. It packs
micro-batches only for its own replicas, listed in `own`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oppo_megatron.columns import Bools, Columns, Ints, columns_of
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.packing import packed_in_order
from oppo_megatron.schedule.planning.ledger import ABSENT, Memo
from oppo_megatron.schedule.planning.replicas import REPLICA, Replicas, pairs_of
from oppo_megatron.schedule.rounds import Batch, Batches, Fork, Growths

CACHED, OPENED, OUTPUTS, LIMIT, OUTLIVED = "cached", "opened", "outputs", "limit", "outlived"
"""Columns: cached tokens (ABSENT: no slot), number of the opening that gave the slot, outputs given, most response tokens, and
updates since the cache was begun."""


@dataclass(frozen=True)
class Grouping:
    """Groups of `size` sequences with neighbouring ids answer one prompt (sequence s in group s // size) and share a replica.

    `fork`: the prompt's cache is computed once per group and forked. `greedy`: the last of each group is decoded greedily.
    """

    size: int = 1
    fork: bool = True
    greedy: bool = False


ALONE = Grouping()


@dataclass
class ReplicaWork:
    """Work of one replica's cache in a round: close (`evict`), open, prefill; `done` is closed at the end.

    A fork is made as soon as its source has enough cached: before the first prefill, or after the prefill of its source.
    """

    evict: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    fork: list[Fork] = field(default_factory=list)
    prefill: Sequence[Batch] = ()
    decode: Sequence[Batch] = ()
    done: list[int] = field(default_factory=list)

    @property
    def num_staying(self) -> int:
        """Sequences that grow in the round and keep their slots: each is decoded or, by a scorer, prefilled once."""
        return Batches.of(self.decode or self.prefill).ends[-1] - len(self.done)


class Book:
    """Base of the books of all roles: `slots` per replica's cache; at most `most` sequences of a group (None: all).

    `prefilled` [3, replicas] counts planned prefills: tokens, sequences (once per round) and outputs; `forked_tokens` the
    tokens saved by forks on all replicas. `grown` are four columns [n] of the last plan: replica, tokens and outputs to
    compute, and True for a sequence that continues a fork of what the plan computes.
    """

    def __init__(
        self,
        replicas: int,
        slots: int,
        columns: Mapping[str, int],
        groups: Grouping,
        most: int | None = None,
        memo: Memo | None = None,
    ):
        self.slots, self.groups, self.forked_tokens = slots, groups, 0
        self._memo = memo or Memo()
        self.prefilled = np.zeros((3, replicas), dtype=np.int64)
        none = np.zeros(0, dtype=np.int64)
        self.grown: tuple[Ints, Ints, Ints, Bools] = none, none, none, none > 0
        self._replicas = Replicas(replicas, slots, {CACHED: ABSENT, OPENED: 0} | dict(columns), groups.size, most, self._memo)
        self._ledger = self._replicas.ledger
        self._num_open = np.zeros(replicas, dtype=np.int64)
        self._num_opened = 0

    def __len__(self) -> int:
        """Number of replicas."""
        return len(self._num_open)

    @property
    def prefilled_tokens(self) -> int:
        """Tokens that prefills were planned to compute so far, on all replicas."""
        return int(self.prefilled[0].sum())

    def replica(self, seq_id: int) -> int:
        """Return the replica of a sequence, after a round with it has been planned."""
        return self._replicas.of(seq_id)

    def homes(self, rollouts: Sequence[Rollout] | Columns) -> Ints:
        """Return the replica of each rollout, after a round with it has been planned."""
        return self._ledger[REPLICA][self._ledger.rows(columns_of(rollouts).seq_ids)]

    def num_open(self, replica: int) -> int:
        """Sequences that keep a slot beyond the last planned round."""
        return int(self._num_open[replica])

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rounds in plain JSON types: each sequence's replica and cached tokens."""
        return {
            "replicas": self._replicas.state_dict(),
            "cached": [list(self.cached(replica).items()) for replica in range(len(self))],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the caches must hold what it records."""
        self._replicas.load_state_dict(state["replicas"])
        for replica, cached in enumerate(state["cached"]):
            rows = self._ledger.enter(CACHED, cached)
            self._stamp(rows)
            self._num_open[replica] = len(rows)

    def cached(self, replica: int) -> dict[int, int]:
        """Cached tokens of each sequence with a slot, in the order of opening."""
        seq_ids = self._open_ids(replica)
        return dict(pairs_of(seq_ids, self._ledger[CACHED][self._ledger.rows(seq_ids)]))

    def _open_ids(self, replica: int) -> Ints:
        """Sequences of the replica with a slot, in the order of opening."""
        ledger = self._ledger
        seq_ids = ledger.where((ledger[REPLICA] == replica) & (ledger[CACHED] != ABSENT))
        return seq_ids[np.argsort(ledger[OPENED][ledger.rows(seq_ids)], kind="stable")]

    def _open(self, rows: Ints) -> None:
        """Give slots without cached tokens to the sequences at `rows`, in that order."""
        self._ledger[CACHED][rows] = 0
        self._stamp(rows)
        self._count(rows, 1)

    def _close(self, rows: Ints) -> None:
        self._ledger[CACHED][rows] = ABSENT
        self._count(rows, -1)

    def _count(self, rows: Ints, each: int) -> None:
        self._num_open += each * np.bincount(self._ledger[REPLICA][rows], minlength=len(self))

    def _tally(self, homes: Ints, tokens: Ints, outputs: Ints, late: Bools) -> None:
        """Count the prefilled sequences by replica; `late`: True for those that continue a fork made in this round."""
        self.grown, replicas = (homes, tokens, outputs, late), len(self)
        self.prefilled[0] += np.bincount(homes, tokens, replicas).astype(np.int64)
        self.prefilled[1] += np.bincount(homes, minlength=replicas)
        self.prefilled[2] += np.bincount(homes, outputs, replicas).astype(np.int64)

    def _stamp(self, rows: Ints) -> None:
        self._ledger[OPENED][rows] = np.arange(self._num_opened, self._num_opened + len(rows))
        self._num_opened += len(rows)

    def _short(self, homes: Ints) -> Ints:
        """Return replicas with too few slots for one more sequence for each of `homes`."""
        return np.flatnonzero(self._num_open + np.bincount(homes, minlength=len(self)) > self.slots)

    def _ours(self, own: Collection[int] | None) -> dict[int, ReplicaWork]:
        """Return empty work for the replicas in `own` (None: all)."""
        return {replica: ReplicaWork() for replica in (range(len(self)) if own is None else own)}

    def _works(self, ours: Mapping[int, ReplicaWork]) -> list[ReplicaWork]:
        """Return the work by replica; other replicas share an empty one."""
        elsewhere = ReplicaWork()
        return [ours.get(replica, elsewhere) for replica in range(len(self))]

    def _current(self) -> Bools:
        """True for rows that have the whole prompt cached by the present weights."""
        current: Bools = self._ledger[CACHED] > 0
        return current

    @property
    def forks(self) -> bool:
        """True if prompts' caches are forked."""
        return self.groups.size > 1 and self.groups.fork

    def _sources(self, rows: Ints, depth: Ints, wanting: Bools | None = None) -> Ints:
        """Return for each of `rows` the sequence to fork at `depth` tokens (the prompt), ABSENT if it forks none.

        `wanting`: True for sequences that are prefilled in this round, or wait for it (None: all). If no member of a group has
        the prompt cached, the first of them computes it.
        """
        sources = np.full(len(rows), ABSENT, dtype=np.int64)
        if not self.forks:
            return sources
        cached, homes = self._ledger[CACHED], self._ledger[REPLICA]
        empty = (cached[rows] <= 0) & (depth > 0)
        fresh = np.flatnonzero(empty if wanting is None else empty & wanting)
        if not len(fresh):
            return sources
        held = np.flatnonzero(self._current())
        both = np.concatenate([held, rows[fresh]])
        seq_ids = self._ledger.ids(both)
        _, first, inverse = np.unique(
            seq_ids // self.groups.size * len(self) + homes[both], return_index=True, return_inverse=True
        )
        found = seq_ids[first[inverse]][len(held) :]
        sources[fresh] = np.where(found == self._ledger.ids(rows[fresh]), ABSENT, found)
        return sources

    def _late(self, depth: Ints, sources: Ints) -> Bools:
        """True for rows with a source that is yet to be computed; called before the plan is recorded."""
        late: Bools = sources != ABSENT
        late[late] = self._ledger[CACHED][self._ledger.rows(sources[late])] < depth[late]
        return late

    def _forks(self, rows: Ints, depth: Ints, sources: Ints) -> list[Fork]:
        """Return the forks of the rows with a source; called before the plan is recorded."""
        to = np.flatnonzero(sources != ABSENT)
        held = np.maximum(self._ledger[CACHED][self._ledger.rows(sources[to])], 0)
        table = sources[to], self._ledger.ids(rows[to]), depth[to], held
        return list(map(Fork, *(column.tolist() for column in table)))


def packed(growths: Growths, which: Ints, forks: Sequence[Fork], budget: int, memo: Memo) -> Batches:
    """Pack the growths at `which` into prefill micro-batches of at most `budget` tokens, each in the order of `which`.

    Sequences that continue a fork come after the prefill of its source.
    """
    waiting = [fork.target for fork in forks if fork.held < fork.tokens]
    if not waiting:
        return _packed(growths, which, budget, memo)
    late = np.isin(growths.seq_ids[which], waiting)
    return Batches.of([batch for part in (~late, late) for batch in _packed(growths, which[part], budget, memo)])


def _packed(growths: Growths, which: Ints, budget: int, memo: Memo) -> Batches:
    members, ends = memo.once(packed_in_order, growths.new[which], budget)
    return Batches(growths.table[:, which[members]], ends)
