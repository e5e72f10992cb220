from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from oppo_megatron.columns import Bools, Columns, Ints, columns_of
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.planning.book import ABSENT, ALONE, CACHED, OUTPUTS, REPLICA, Book, Grouping, ReplicaWork, packed
from oppo_megatron.schedule.rounds import Growths


class Unread(NamedTuple):
    """Sequences with unread tokens: `cached` now (ABSENT: no slot), and `targets`, to be cached after the round."""

    columns: Columns
    rows: Ints
    replicas: Ints
    cached: Ints
    targets: Ints

    def at(self, which: Ints) -> Unread:
        return Unread(self.columns.at(which), *(column[which] for column in self[1:]))


class ScoringBook(Book):
    """Only the reward model reads a response's last token: other roles score token t at position P + t - 1 (P: prompt tokens).

    If slots are short, finished sequences evict the youngest unfinished ones, whose outputs stay valid. `every_token`: outputs
    are per token, not per response. Without `reads_greedy`, greedy sequences are left out.
    """

    def __init__(
        self, role: str, replicas: int, slots: int, groups: Grouping = ALONE, *, every_token: bool = False,
        reads_greedy: bool = True,
    ):  # fmt: skip
        self._leaves_out = groups.greedy and not reads_greedy
        super().__init__(replicas, slots, {OUTPUTS: 0}, groups, groups.size - self._leaves_out)
        self.role, self.every_token = role, every_token or role != "reward"
        self.perishable = role == "critic"  # each update makes what it has computed stale

    def owes(self, rollouts: Sequence[Rollout] | Columns) -> bool:
        columns = self._incomplete(rollouts)
        return bool(self._missing(columns, *self._state(columns)).any())

    def unread(self, rollouts: Sequence[Rollout] | Columns) -> Unread:
        """Return sequences with unread tokens, each with a replica."""
        columns = self._incomplete(rollouts)
        replicas = self.place(columns)
        rows, cached, targets = self._state(columns)
        found, missing = Unread(columns, rows, replicas, cached, targets), self._missing(columns, rows, cached, targets)
        return found if missing.all() else found.at(np.flatnonzero(missing))

    def pending(self, rollouts: Sequence[Rollout] | Columns | Unread) -> tuple[Ints, Ints]:
        """Return the replica and the number of unread tokens of each sequence."""
        columns, rows, replicas, cached, targets = rollouts if isinstance(rollouts, Unread) else self.unread(rollouts)
        cached = np.maximum(cached, 0)
        depth = self._depth(columns)
        cached = np.where(self._sources(rows, depth) != ABSENT, depth, cached)
        news = targets - cached
        grow = np.flatnonzero(news > 0)
        return replicas[grow], news[grow]

    def plan(
        self, rollouts: Sequence[Rollout] | Columns | Unread, budget: int, own: Collection[int] | None = None
    ) -> list[ReplicaWork]:
        """Open slots; return the work by replica, empty outside `own`.  The book counts all of it as done."""
        ours = self._ours(own)
        admitted = self._admit(rollouts if isinstance(rollouts, Unread) else self.unread(rollouts), ours)
        self._fork(admitted, ours)
        table, finished = self._grow(admitted), admitted.columns.finished
        grown, ended = np.flatnonzero(table.new > 0), np.flatnonzero(finished)
        replicas = admitted.replicas[grown]
        self.prefilled_tokens += int(table.new[grown].sum())
        for replica, work in ours.items():
            work.prefill = packed(table, grown[replicas == replica], work.fork, budget)
            work.done = table.seq_ids[ended[admitted.replicas[ended] == replica]].tolist()
        self._close(admitted.rows[ended])
        return self._works(ours)

    def forget(self, *seq_ids: int, unread: bool = False) -> None:
        """Remove sequences that were trained or, with `unread`, will not be trained and may be unscored."""
        rows = self._ledger.rows(np.array(seq_ids, dtype=np.int64))
        held = rows[self._ledger[CACHED][rows] != ABSENT]
        assert unread or not len(held), f"{self.role}: sequence {self._ledger.ids(held).min()} was trained unscored"
        self._close(held)
        self._ledger[OUTPUTS][rows] = 0
        self._ledger[REPLICA][rows] = ABSENT

    def cut(self, rollouts: Columns) -> None:
        """Keep what was computed of prompts and the first `response_tokens` of each response; another token follows."""
        rows, kept, ledger = self._ledger.rows(rollouts.seq_ids), rollouts.response_tokens, self._ledger
        ledger[CACHED][rows] = np.minimum(ledger[CACHED][rows], self._depth(rollouts) + kept)
        ledger[OUTPUTS][rows] = np.minimum(ledger[OUTPUTS][rows], kept if self.every_token else 0)

    def reset(self) -> None:
        self._ledger[OUTPUTS][:] = 0
        self._ledger[CACHED][:] = ABSENT
        self._num_open[:] = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"outputs": self._ledger.pairs(OUTPUTS, self._ledger[OUTPUTS] > 0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._ledger.enter(OUTPUTS, state["outputs"])

    def outputs(self, replica: int) -> Mapping[int, int]:
        return dict(self._ledger.pairs(OUTPUTS, (self._ledger[OUTPUTS] > 0) & (self._ledger[REPLICA] == replica)))

    def _incomplete(self, rollouts: Sequence[Rollout] | Columns) -> Columns:
        columns, size = columns_of(rollouts), self.groups.size
        if self._leaves_out:
            columns = columns.at(columns.seq_ids % size != size - 1)
        ended = np.flatnonzero(columns.finished)
        rows, due = self._ledger.rows(columns.seq_ids[ended]), columns.response_tokens[ended] if self.every_token else 1
        complete = self._ledger[OUTPUTS][rows] >= due
        if not complete.any():
            return columns
        left = np.ones(len(columns.seq_ids), dtype=np.bool_)
        left[ended[complete]] = False
        return columns.at(left)

    def _depth(self, columns: Columns) -> Ints:
        return columns.prompt_tokens - (self.role != "reward")

    def _state(self, columns: Columns) -> tuple[Ints, Ints, Ints]:
        rows = self._ledger.rows(columns.seq_ids)
        return rows, self._ledger[CACHED][rows], columns.num_tokens - (self.role != "reward")

    def _missing(self, columns: Columns, rows: Ints, cached: Ints, targets: Ints) -> Bools:
        missing: Bools = (np.maximum(cached, 0) < targets) | columns.finished
        return missing

    def _admit(self, unread: Unread, ours: Mapping[int, ReplicaWork]) -> Unread:
        columns, rows, replicas, cached, _ = unread
        new = np.flatnonzero(cached == ABSENT)
        if not len(new):
            return unread
        ended = columns.finished[new]
        new = np.concatenate([new[ended], new[~ended]])
        short = self._short(replicas[new])
        for replica in short.tolist():
            self._make_way(replica, columns.at(replicas == replica), ours.get(replica) or ReplicaWork())
        if len(short):
            new = new[~np.isin(replicas[new], short)]
        self._open(rows[new])
        for replica, work in ours.items():
            work.open += columns.seq_ids[new[replicas[new] == replica]].tolist()
        now = unread._replace(cached=self._ledger[CACHED][rows])
        return now.at(np.flatnonzero(now.cached != ABSENT)) if len(short) else now

    def _make_way(self, replica: int, columns: Columns, work: ReplicaWork) -> None:
        wanted = list(zip(columns.seq_ids.tolist(), columns.finished.tolist(), strict=True))
        finished = {seq_id for seq_id, ended in wanted if ended}
        cached = set(self._open_ids(replica).tolist())
        youngest = sorted(cached - finished)
        for seq_id, ended in sorted(wanted, key=lambda each: not each[1]):
            if seq_id in cached:
                continue
            if len(cached) == self.slots and ended and youngest:
                work.evict.append(youngest.pop())
                cached.remove(work.evict[-1])
            if len(cached) < self.slots:
                cached.add(seq_id)
                work.open.append(seq_id)
        self._close(self._ledger.rows(np.array(work.evict, dtype=np.int64)))
        self._open(self._ledger.rows(np.array(work.open, dtype=np.int64)))

    def _fork(self, admitted: Unread, ours: Mapping[int, ReplicaWork]) -> None:
        columns, rows, replicas, cached, _ = admitted
        depth = self._depth(columns)
        sources = self._sources(rows, depth)
        forked: Bools = sources != ABSENT
        if not forked.any():
            return
        for replica, work in ours.items():
            here = forked & (replicas == replica)
            work.fork = self._forks(rows[here], depth[here], sources[here])
        cached[forked] = depth[forked]
        self.forked_tokens += int(depth[forked].sum())

    def _grow(self, admitted: Unread) -> Growths:
        columns, rows, _, past, target = admitted
        given = columns.finished.astype(np.int64)
        if self.every_token:
            outputs = self._ledger[OUTPUTS][rows]
            given = np.maximum(0, target - np.maximum(self._depth(columns) + outputs, past))
            self._ledger[OUTPUTS][rows] = outputs + given
        else:
            self._ledger[OUTPUTS][rows[columns.finished]] += 1
        self._ledger[CACHED][rows] = target
        return Growths(np.stack([columns.seq_ids, past, target - past, given]))
