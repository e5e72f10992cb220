"""Each role's cached and computed tokens of every rollout, kept alike on all ranks that plan a round with it.  Pure.

A book assigns sequences to replicas and cache slots, and says what each micro-batch of the coming round adds; the caches
themselves follow it.

Every rank keeps the books of all replicas, because all come to the same numbers from the same chunks; it does so in arrays
over all sequences.  Micro-batches it needs of its own replicas only: `own` are those that `plan` packs them for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oppo_megatron.columns import Bools, Columns, Ints, columns_of
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.packing import packed_in_order
from oppo_megatron.schedule.planning.alike import Alike
from oppo_megatron.schedule.planning.ledger import ABSENT
from oppo_megatron.schedule.planning.replicas import REPLICA, Replicas, pairs_of
from oppo_megatron.schedule.rounds import Batch, Batches, Fork, Growths

CACHED, OPENED, OUTPUTS, LIMIT, OUTLIVED = "cached", "opened", "outputs", "limit", "outlived"
"""Columns: tokens cached (ABSENT: no slot), which opening gave the slot, outputs given, most response tokens, 1 where a
sequence has a slot and does not run, updates made since its cache was begun."""


@dataclass(frozen=True)
class Grouping:
    """`size` sequences with neighbouring ids answer one prompt, sequence s in group s // size.  They share a replica.

    `fork`: the prompt's cache is computed once there, and forked for the others.  `greedy`: the last of each group is decoded
    greedily.
    """

    size: int = 1
    fork: bool = True
    greedy: bool = False


ALONE = Grouping()


@dataclass
class ReplicaWork:
    """What a round asks of one replica's cache: close, then open, then prefill; `done` is closed at the end.

    A fork is made as soon as its source has enough cached: before the first prefill, or behind that of its source.
    """

    evict: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    fork: list[Fork] = field(default_factory=list)
    prefill: Sequence[Batch] = ()
    decode: Sequence[Batch] = ()
    done: list[int] = field(default_factory=list)

    @property
    def num_staying(self) -> int:
        """Sequences that grow in the round and keep their slots beyond it: each is decoded or, by a scorer, prefilled once."""
        return Batches.of(self.decode or self.prefill).ends[-1] - len(self.done)


class Book:
    """What the books of all roles have: `slots` of each replica's cache, and who has one; `most`: of a group (None: all).

    `prefilled` [3, replicas] counts what prefills were planned to compute: tokens, sequences (once a round) and outputs;
    `forked_tokens` what forks have saved, on all replicas.  `grown`, four columns [n]: of each sequence of the plan made last its
    replica, the tokens that are computed of it, its outputs, and whether it continues a fork of what the plan computes.
    """

    def __init__(
        self,
        replicas: int,
        slots: int,
        columns: Mapping[str, int],
        groups: Grouping,
        most: int | None = None,
        alike: Alike | None = None,
    ):
        self.slots, self.groups, self.forked_tokens = slots, groups, 0
        self._alike = alike or Alike()
        self.prefilled = np.zeros((3, replicas), dtype=np.int64)
        none = np.zeros(0, dtype=np.int64)
        self.grown: tuple[Ints, Ints, Ints, Bools] = none, none, none, none > 0
        self._replicas = Replicas(replicas, slots, {CACHED: ABSENT, OPENED: 0} | dict(columns), groups.size, most, self._alike)
        self._ledger = self._replicas.ledger
        self._num_open = np.zeros(replicas, dtype=np.int64)
        self._num_opened = 0

    def __len__(self) -> int:
        """Replicas."""
        return len(self._num_open)

    @property
    def prefilled_tokens(self) -> int:
        """Tokens that prefills were planned to compute so far, on all replicas."""
        return int(self.prefilled[0].sum())

    def replica(self, seq_id: int) -> int:
        """The replica that the sequence belongs to, once a round with it has been planned."""
        return self._replicas.of(seq_id)

    def homes(self, rollouts: Sequence[Rollout] | Columns) -> Ints:
        """The replica of each, once a round with it has been planned."""
        return self._ledger[REPLICA][self._ledger.rows(columns_of(rollouts).seq_ids)]

    def num_open(self, replica: int) -> int:
        """Sequences that have a slot beyond the round planned last."""
        return int(self._num_open[replica])

    def state_dict(self) -> dict[str, Any]:
        """The state between two rounds, in plain JSON types: each sequence's replica and its cached tokens."""
        return {
            "replicas": self._replicas.state_dict(),
            "cached": [list(self.cached(replica).items()) for replica in range(len(self))],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the caches hold what it says."""
        self._replicas.load_state_dict(state["replicas"])
        for replica, cached in enumerate(state["cached"]):
            rows = self._ledger.enter(CACHED, cached)
            self._stamp(rows)
            self._num_open[replica] = len(rows)

    def cached(self, replica: int) -> dict[int, int]:
        """Tokens cached of each sequence that has a slot, in the order of opening."""
        seq_ids = self._open_ids(replica)
        return dict(pairs_of(seq_ids, self._ledger[CACHED][self._ledger.rows(seq_ids)]))

    def _open_ids(self, replica: int) -> Ints:
        """Sequences of the replica that have a slot, in the order of opening."""
        ledger = self._ledger
        seq_ids = ledger.where((ledger[REPLICA] == replica) & (ledger[CACHED] != ABSENT))
        return seq_ids[np.argsort(ledger[OPENED][ledger.rows(seq_ids)], kind="stable")]

    def _open(self, rows: Ints) -> None:
        """Give slots to the sequences at `rows`, in that order; nothing of them is cached."""
        self._ledger[CACHED][rows] = 0
        self._stamp(rows)
        self._count(rows, 1)

    def _close(self, rows: Ints) -> None:
        self._ledger[CACHED][rows] = ABSENT
        self._count(rows, -1)

    def _count(self, rows: Ints, each: int) -> None:
        self._num_open += each * np.bincount(self._ledger[REPLICA][rows], minlength=len(self))

    def _tally(self, homes: Ints, tokens: Ints, outputs: Ints, late: Bools) -> None:
        """Each sequence that is prefilled, at its replica; `late` are those behind what they fork."""
        self.grown, replicas = (homes, tokens, outputs, late), len(self)
        self.prefilled[0] += np.bincount(homes, tokens, replicas).astype(np.int64)
        self.prefilled[1] += np.bincount(homes, minlength=replicas)
        self.prefilled[2] += np.bincount(homes, outputs, replicas).astype(np.int64)

    def _stamp(self, rows: Ints) -> None:
        self._ledger[OPENED][rows] = np.arange(self._num_opened, self._num_opened + len(rows))
        self._num_opened += len(rows)

    def _short(self, homes: Ints) -> Ints:
        """Replicas that have too few slots for one more sequence at each of `homes`."""
        return np.flatnonzero(self._num_open + np.bincount(homes, minlength=len(self)) > self.slots)

    def _ours(self, own: Collection[int] | None) -> dict[int, ReplicaWork]:
        """The work of the replicas in `own` (None: of all), to be filled in."""
        return {replica: ReplicaWork() for replica in (range(len(self)) if own is None else own)}

    def _works(self, ours: Mapping[int, ReplicaWork]) -> list[ReplicaWork]:
        """By replica; what is not ours shares one that is empty."""
        elsewhere = ReplicaWork()
        return [ours.get(replica, elsewhere) for replica in range(len(self))]

    def _current(self) -> Bools:
        """Of which rows of the ledger the cache is that of the present weights, with all of the prompt that is to be read."""
        current: Bools = self._ledger[CACHED] > 0
        return current

    @property
    def forks(self) -> bool:
        """Whether a prompt's cache is ever forked."""
        return self.groups.size > 1 and self.groups.fork

    def _sources(self, rows: Ints, depth: Ints, wanting: Bools | None = None) -> Ints:
        """For each of `rows` the sequence whose cache it forks at `depth` tokens, the prompt's; ABSENT where it forks none.

        `wanting`: those that are prefilled in this round, or wait for it (None: all).  Where nobody in a group has the prompt
        cached, the first of them computes it.
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
        """Which have a source that is to be computed, before the round is booked."""
        late: Bools = sources != ABSENT
        late[late] = self._ledger[CACHED][self._ledger.rows(sources[late])] < depth[late]
        return late

    def _forks(self, rows: Ints, depth: Ints, sources: Ints) -> list[Fork]:
        """The forks of those of `rows` that have a source, before the round is booked."""
        to = np.flatnonzero(sources != ABSENT)
        held = np.maximum(self._ledger[CACHED][self._ledger.rows(sources[to])], 0)
        table = sources[to], self._ledger.ids(rows[to]), depth[to], held
        return list(map(Fork, *(column.tolist() for column in table)))


def packed(growths: Growths, which: Ints, forks: Sequence[Fork], budget: int, alike: Alike) -> Batches:
    """Those of `growths` at `which` in prefill micro-batches of at most `budget` tokens, each in the order of `which`.

    What continues a fork comes behind what computes its source.
    """
    waiting = [fork.target for fork in forks if fork.held < fork.tokens]
    if not waiting:
        return _packed(growths, which, budget, alike)
    late = np.isin(growths.seq_ids[which], waiting)
    return Batches.of([batch for part in (~late, late) for batch in _packed(growths, which[part], budget, alike)])


def _packed(growths: Growths, which: Ints, budget: int, alike: Alike) -> Batches:
    members, ends = alike.once(packed_in_order, growths.new[which], budget)
    return Batches(growths.table[:, which[members]], ends)
