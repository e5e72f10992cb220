"""Books: the replica, cached tokens and outputs of each rollout of a role, the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from oppo_megatron.columns import Bools, Columns, Ints, columns_of
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.packing import dealt, packed_in_order
from oppo_megatron.schedule.rounds import Batch, Fork, Growths

Pairs = list[tuple[int, int]]
"""A mapping by sequence id; as a JSON object it would lose the type of its keys."""

ABSENT = -1  # a missing number in columns that use 0


class Ledger:
    """Columns of integers, a row per sequence id.  A row is in use if column `entered` differs from its default in `columns`."""

    def __init__(self, entered: str, columns: Mapping[str, int]):
        self._entered, self._unset = entered, dict(columns)
        self._first = 0
        self._columns: dict[str, Ints] = {name: np.zeros(0, dtype=np.int64) for name in columns}

    def __getitem__(self, name: str) -> Ints:
        """Return a column, valid until the next call of `rows`."""
        return self._columns[name]

    def rows(self, seq_ids: Ints) -> Ints:
        """Return the sequences' rows.  New ids may enlarge the columns, which moves all rows."""
        if len(seq_ids):
            low, high = int(seq_ids.min()), int(seq_ids.max())
            if low < self._first or high >= self._first + len(self):
                self._make_room(low, high)
        return seq_ids - self._first

    def ids(self, rows: Ints) -> Ints:
        return rows + self._first

    def row(self, seq_id: int) -> int:
        """Raises KeyError if the sequence is unused."""
        row = seq_id - self._first
        if not (0 <= row < len(self) and self._columns[self._entered][row] != self._unset[self._entered]):
            raise KeyError(seq_id)
        return row

    def __len__(self) -> int:
        return len(self._columns[self._entered])

    def where(self, mask: npt.NDArray[np.bool_]) -> Ints:
        return self.ids(np.flatnonzero(mask))

    def pairs(self, name: str, mask: npt.NDArray[np.bool_]) -> Pairs:
        return list(zip(self.where(mask).tolist(), self[name][mask].tolist(), strict=True))

    def enter(self, name: str, pairs: Pairs) -> Ints:
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        rows = self.rows(table[:, 0])
        self[name][rows] = table[:, 1]
        return rows

    def clear(self) -> None:
        for name, unset in self._unset.items():
            self._columns[name][:] = unset

    def _make_room(self, low: int, high: int) -> None:
        used = self.where(self._columns[self._entered] != self._unset[self._entered])
        if len(used):
            low, high = min(low, int(used[0])), max(high, int(used[-1]))
        size = 2 * (high + 1 - low)
        for name, unset in self._unset.items():
            column = np.full(size, unset, dtype=np.int64)
            if len(used):
                column[used - low] = self._columns[name][used - self._first]
            self._columns[name] = column
        self._first = low


REPLICA, CACHED, OPENED, OUTPUTS, LIMIT, OUTLIVED = "replica", "cached", "opened", "outputs", "limit", "outlived"
"""Columns: replica, cached tokens (ABSENT: no slot), order of opening, outputs, most response tokens, updates since caching."""


@dataclass(frozen=True)
class Grouping:
    """`size` neighbouring ids share prompt and replica. `fork`: cache the prompt once. `greedy`: decode the last greedily."""

    size: int = 1
    fork: bool = True
    greedy: bool = False


ALONE = Grouping()


@dataclass
class ReplicaWork:
    """A replica's round: close `evict`, open, prefill, decode, close `done`; `fork` as soon as a source has enough cached."""

    evict: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    fork: list[Fork] = field(default_factory=list)
    prefill: Sequence[Batch] = field(default_factory=list)
    decode: Sequence[Batch] = field(default_factory=list)
    done: list[int] = field(default_factory=list)

    @property
    def num_staying(self) -> int:
        return sum(map(len, self.decode or self.prefill)) - len(self.done)


class Book:
    """A role's book.  `slots`: sequences that a replica's cache holds; `most`: sequences of a group that the role reads."""

    def __init__(self, replicas: int, slots: int, columns: Mapping[str, int], groups: Grouping, most: int | None = None):
        self.slots, self.groups, self.prefilled_tokens, self.forked_tokens = slots, groups, 0, 0
        self._most = groups.size if most is None else most
        self._ledger = Ledger(REPLICA, {REPLICA: ABSENT, CACHED: ABSENT, OPENED: 0} | dict(columns))
        self._num_open = np.zeros(replicas, dtype=np.int64)
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._num_open)

    def replica(self, seq_id: int) -> int:
        return int(self._ledger[REPLICA][self._ledger.row(seq_id)])

    def replicas(self, rollouts: Sequence[Rollout] | Columns) -> Ints:
        return self._ledger[REPLICA][self._ledger.rows(columns_of(rollouts).seq_ids)]

    def place(self, held: Sequence[Rollout] | Columns) -> Ints:
        """Return the replica of each of `held` (all sequences), after choosing one for each new group."""
        columns = columns_of(held)
        rows = self._ledger.rows(columns.seq_ids)
        replicas = self._ledger[REPLICA]
        if not (replicas[rows] == ABSENT).any():
            return replicas[rows]
        groups = self._ledger.ids(np.arange(len(self._ledger))) // self.groups.size
        groups -= groups[0]
        known = np.flatnonzero(replicas != ABSENT)
        of_group = np.full(groups[-1] + 1, ABSENT)
        of_group[groups[known]] = replicas[known]
        replicas[rows] = np.where(replicas[rows] == ABSENT, of_group[groups[rows]], replicas[rows])
        placed = replicas[rows] != ABSENT
        parts = _sums(columns.at(placed), replicas[rows[placed]], len(self))
        _, first, group = np.unique(groups[rows[~placed]], return_index=True, return_inverse=True)
        arrivals = _sums(columns.at(~placed), group, len(first))
        order = np.lexsort((first, -arrivals[0]))  # longest first, ties in the order of `held`
        found = np.empty_like(order)
        found[order] = dealt(parts, self.slots, arrivals[:, order], self._most)
        replicas[rows[~placed]] = found[group]
        return replicas[rows]

    def num_open(self, replica: int) -> int:
        return int(self._num_open[replica])

    def state_dict(self) -> dict[str, Any]:
        return {
            "replicas": self._ledger.pairs(REPLICA, self._ledger[REPLICA] != ABSENT),
            "cached": [list(self.cached(replica).items()) for replica in range(len(self))],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The caches must match `state`."""
        self._ledger.clear()
        self._ledger.enter(REPLICA, state["replicas"])
        for replica, cached in enumerate(state["cached"]):
            rows = self._ledger.enter(CACHED, cached)
            self._stamp(rows)
            self._num_open[replica] = len(rows)

    def cached(self, replica: int) -> dict[int, int]:
        """Cached tokens by sequence, in the order of opening."""
        seq_ids = self._open_ids(replica)
        return dict(zip(seq_ids.tolist(), self._ledger[CACHED][self._ledger.rows(seq_ids)].tolist(), strict=True))

    def _open_ids(self, replica: int) -> Ints:
        ledger = self._ledger
        seq_ids = ledger.where((ledger[REPLICA] == replica) & (ledger[CACHED] != ABSENT))
        return seq_ids[np.argsort(ledger[OPENED][ledger.rows(seq_ids)], kind="stable")]

    def _open(self, rows: Ints) -> None:
        self._ledger[CACHED][rows] = 0
        self._stamp(rows)
        self._num_open += np.bincount(self._ledger[REPLICA][rows], minlength=len(self))

    def _close(self, rows: Ints) -> None:
        self._ledger[CACHED][rows] = ABSENT
        self._num_open -= np.bincount(self._ledger[REPLICA][rows], minlength=len(self))

    def _stamp(self, rows: Ints) -> None:
        self._ledger[OPENED][rows] = np.arange(self._num_opened, self._num_opened + len(rows))
        self._num_opened += len(rows)

    def _short(self, replicas: Ints) -> Ints:
        return np.flatnonzero(self._num_open + np.bincount(replicas, minlength=len(self)) > self.slots)

    def _ours(self, own: Collection[int] | None) -> dict[int, ReplicaWork]:
        return {replica: ReplicaWork() for replica in (range(len(self)) if own is None else own)}

    def _works(self, ours: Mapping[int, ReplicaWork]) -> list[ReplicaWork]:
        elsewhere = ReplicaWork()
        return [ours.get(replica, elsewhere) for replica in range(len(self))]

    def _current(self) -> Bools:
        current: Bools = self._ledger[CACHED] > 0
        return current

    @property
    def forks(self) -> bool:
        return self.groups.size > 1 and self.groups.fork

    def _sources(self, rows: Ints, depth: Ints, wanting: Bools | None = None) -> Ints:
        """Return for each of `rows` a sequence to fork `depth` tokens from, or ABSENT; `wanting`: mask of rows that run."""
        sources = np.full(len(rows), ABSENT, dtype=np.int64)
        if not self.forks:
            return sources
        cached, replicas = self._ledger[CACHED], self._ledger[REPLICA]
        empty = (cached[rows] <= 0) & (depth > 0)
        fresh = np.flatnonzero(empty if wanting is None else empty & wanting)
        if not len(fresh):
            return sources
        held = np.flatnonzero(self._current())
        both = np.concatenate([held, rows[fresh]])
        seq_ids = self._ledger.ids(both)
        _, first, inverse = np.unique(
            seq_ids // self.groups.size * len(self) + replicas[both], return_index=True, return_inverse=True
        )
        found = seq_ids[first[inverse]][len(held) :]
        sources[fresh] = np.where(found == self._ledger.ids(rows[fresh]), ABSENT, found)
        return sources

    def _forks(self, rows: Ints, depth: Ints, sources: Ints) -> list[Fork]:
        to = np.flatnonzero(sources != ABSENT)
        held = np.maximum(self._ledger[CACHED][self._ledger.rows(sources[to])], 0)
        table = sources[to], self._ledger.ids(rows[to]), depth[to], held
        return list(map(Fork, *(column.tolist() for column in table)))


def _sums(columns: Columns, of: Ints, count: int) -> Ints:
    """Sum tokens, sequences, unfinished sequences per replica or group (`of`: its number), [3, count]."""
    weights = columns.num_tokens, np.ones_like(of), ~columns.finished
    return np.stack([np.bincount(of, each, count) for each in weights]).astype(np.int64)


def packed(growths: Growths, which: Ints, forks: Sequence[Fork], budget: int) -> list[Growths]:
    """Pack the growths at `which` into micro-batches of at most `budget` tokens, fork targets after their sources."""
    late = np.isin(growths.seq_ids[which], [fork.target for fork in forks if fork.held < fork.tokens])
    bins = [part[own] for part in (which[~late], which[late]) for own in packed_in_order(growths.new[part], budget)]
    return list(map(growths.at, bins))
