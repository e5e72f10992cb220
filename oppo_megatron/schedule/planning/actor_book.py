from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from oppo_megatron.columns import Bools, Columns, Ints, columns_of
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.planning.book import (
    ABSENT,
    ALONE,
    CACHED,
    LIMIT,
    OPENED,
    OUTLIVED,
    REPLICA,
    Book,
    Grouping,
    ReplicaWork,
    packed,
)
from oppo_megatron.schedule.rounds import Growths
from oppo_megatron.schedule.weaving.cut import even_ends


class Active(NamedTuple):
    """Unfinished rollouts: `rows` (valid until the book's next call), replicas, and `rooms`: tokens that each may still get."""

    columns: Columns
    rows: Ints
    replicas: Ints
    rooms: Ints


class ActorBook(Book):
    """Between rounds all tokens of an open sequence but the last are cached; if its cache is stale, it is prefilled again."""

    def __init__(self, replicas: int, slots: int, limit: Callable[[int], int], groups: Grouping = ALONE):
        super().__init__(replicas, slots, {LIMIT: ABSENT, OUTLIVED: 0}, groups)
        self._limit = limit

    def active(self, rollouts: Sequence[Rollout] | Columns) -> Active:
        """Return the unfinished rollouts, each with a replica."""
        columns = columns_of(rollouts)
        replicas, rows = self.place(columns), self._ledger.rows(columns.seq_ids)
        limits = self._ledger[LIMIT]
        unknown = limits[rows] == ABSENT
        if unknown.any():
            limits[rows[unknown]] = [self._limit(seq_id) for seq_id in columns.seq_ids[unknown].tolist()]
        return Active(columns, rows, replicas, limits[rows] - columns.response_tokens)

    def running(self, active: Active) -> list[int]:
        counts: list[int] = np.minimum(np.bincount(active.replicas, minlength=len(self)), self.slots).tolist()
        return counts

    def steps(self, active: Active, chunk: int) -> int:
        return min(chunk, int(active.rooms.max(initial=0)))

    def plan(
        self, active: Sequence[Rollout] | Columns | Active, steps: int, micro_batches: int, budget: int,
        order: Callable[[Sequence[int]], list[int]], own: Collection[int] | None = None,
    ) -> list[ReplicaWork]:  # fmt: skip
        """Open free slots; return the work by replica, empty outside `own`.  `order(seq_ids)` sorts by cache slot."""
        columns, rows, replicas, rooms = active if isinstance(active, Active) else self.active(active)
        running, new = self._admit(rows, replicas)
        ours, cached = self._ours(own), self._ledger[CACHED][rows]
        due, none, depth = columns.num_tokens - 1, np.zeros_like(rooms), columns.prompt_tokens - 1
        sources = self._sources(rows, depth, running)
        forked = sources != ABSENT
        self.forked_tokens += int(depth[forked].sum())
        cached = np.where(forked, depth, cached)
        self.prefilled_tokens += int(np.maximum(due - cached, 0)[running].sum())
        decode = Growths(np.stack([columns.seq_ids, due, np.minimum(steps, rooms), none]))
        stale = Growths(np.stack([columns.seq_ids, cached, due - cached, none]))
        for replica, work in ours.items():
            here = np.flatnonzero(running & (replicas == replica))
            opened = here[new[here]]
            work.open = columns.seq_ids[opened].tolist()
            lined = self._in_line(rows, here[~new[here]], opened, order)
            forks = here[sources[here] != ABSENT]
            work.fork = self._forks(rows[forks], depth[forks], sources[forks])
            work.prefill = packed(stale, lined[stale.new[lined] > 0], work.fork, budget)
            ends = even_ends(len(lined), micro_batches)
            work.decode = [decode.at(lined[start:end]) for start, end in pairwise(ends)]
        return self._works(ours)

    def _in_line(self, rows: Ints, before: Ints, new: Ints, order: Callable[[Sequence[int]], list[int]]) -> Ints:
        ledger = self._ledger
        before = before[np.argsort(ledger[OPENED][rows[before]], kind="stable")]
        position = np.empty(len(ledger), dtype=np.int64)
        position[rows[before]] = before
        ordered = order(ledger.ids(rows[before]).tolist())
        return np.concatenate([position[ledger.rows(np.array(ordered, dtype=np.int64))], new])

    def runs(self, rollouts: Sequence[Rollout] | Columns) -> Bools:
        run: Bools = self._ledger[CACHED][self._ledger.rows(columns_of(rollouts).seq_ids)] != ABSENT
        return run

    def record(self, rollouts: Sequence[Rollout]) -> None:
        columns = columns_of(rollouts)
        rows, run = self._ledger.rows(columns.seq_ids), self.runs(columns)
        going, ended = np.flatnonzero(run & ~columns.finished), rows[run & columns.finished]
        self._ledger[CACHED][rows[going]] = columns.num_tokens[going] - 1
        self._close(ended)
        self._ledger[REPLICA][ended] = ABSENT
        self._ledger[OUTLIVED][ended] = 0

    def invalidate(self) -> None:
        self._ledger[CACHED][self._ledger[CACHED] != ABSENT] = 0  # slots stay open
        self._ledger[OUTLIVED][:] = 0

    def keep(self) -> None:
        self._ledger[OUTLIVED][self._ledger[CACHED] > 0] += 1  # the weights have changed, the caches are kept

    @property
    def outlived(self) -> Mapping[int, int]:
        return dict(self._ledger.pairs(OUTLIVED, self._ledger[OUTLIVED] > 0))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"outlived": self._ledger.pairs(OUTLIVED, self._ledger[OUTLIVED] > 0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._ledger.enter(OUTLIVED, state.get("outlived") or [])  # older checkpoints have none

    def _current(self) -> Bools:
        current: Bools = super()._current() & (self._ledger[OUTLIVED] == 0)
        return current

    def _admit(self, rows: Ints, replicas: Ints) -> tuple[Bools, Bools]:
        """Open free slots; return masks of the sequences that run and of those just opened."""
        new = self._ledger[CACHED][rows] == ABSENT
        for replica in self._short(replicas[new]).tolist():
            waiting = np.flatnonzero(new & (replicas == replica))
            new[waiting[self.slots - self.num_open(replica) :]] = False
        self._open(rows[new])
        return self._ledger[CACHED][rows] != ABSENT, new
