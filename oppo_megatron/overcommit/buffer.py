"""Holds growing rollouts and selects the batch of each step.

A *group* is the n responses to one prompt; *clock* counts the run's decode steps; η is `max_staleness`.

1. A group leaves whole, in one batch of B groups (fewer at the end of the prompts).
2. Prompts are admitted up to B + delta groups (after delta decreases, none until the buffer is down to that). With backfill
   the limits are n (B + delta) unfinished rollouts and 2B groups (if delta > B: the smaller of B + delta and (η + 1) B).
3. Except groups that it had to wait for because of their age (`ahead.py`), a batch's groups finished no later than those left.
4. While delta <= η B (with backfill: always), no group is deferred more than η times.
5. A batch takes room until the weights trained on it are installed. The number of such batches is the first age of a new group,
   whose last age is then the number of versions between the weights at its admission and those that are trained with it.
With a filter, groups may also be dropped, only kept ones count as finished, and backfill, too, stops at B + delta groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from oppo_megatron.chunks import REASONS, UNFINISHED, Chunk, ChunkRow, ChunkRows, FinishReason
from oppo_megatron.columns import Bools, Held, Ints, Table
from oppo_megatron.errors import StreamError
from oppo_megatron.overcommit.ahead import JudgedReadiness, Readiness, due, next_groups
from oppo_megatron.records import Lists, Prompt, Rollout


class RolloutBuffer:
    def __init__(
        self, batch_size: int, delta: int, max_staleness: int, *, backfill: bool = False, group_size: int = 1,
        filtered: bool = False, queue_size: int | None = None,
    ):  # fmt: skip
        """`batch_size` in rollouts, `delta` and `queue_size` in groups, `max_staleness` in batches."""
        assert batch_size >= 1 and delta >= 0 and max_staleness >= 1 and batch_size % group_size == 0
        self.batch_size = batch_size
        self.group_size = group_size
        self.max_staleness = max_staleness
        self.backfill = backfill
        self.delta = delta
        self.filtered, self.queue_size = filtered, queue_size
        self.kept: set[int] = set()  # with a filter: groups that may be trained, by number
        self._rollouts: dict[int, Rollout] = {}  # by seq_id, in the order of admission
        self._unfinished: dict[int, Rollout] = {}  # the unfinished ones, in the same order
        self._ages: Ints = np.zeros(0, dtype=np.int64)  # deferrals of each group of the table
        self._table = Table()  # in the order of admission
        self._recorded: list[ChunkRows] = []  # since the oldest rollout was admitted; rollouts read their tokens from it
        self._num_admitted = 0
        self.clock = 0
        self.pending = 0  # batches taken whose weights are not installed yet; the scheduler counts them
        self._closed = False

    def __len__(self) -> int:
        return len(self._rollouts)

    @property
    def capacity(self) -> int:
        return self.batch_size + self.delta * self.group_size

    @property
    def room(self) -> int:
        if self.queue_size is not None:  # complete groups, queued ones too, must not be more
            waiting = int(self._finished_groups().sum()) + self.pending * self.batch_size // self.group_size
            if waiting >= self.queue_size:
                return 0
        room = self.capacity - len(self) - self.pending * self.batch_size
        if self.backfill and not self.filtered:
            room = min(self.capacity - len(self._unfinished), self._most - len(self))
        return max(0, room // self.group_size * self.group_size)

    @property
    def full(self) -> bool:
        return len(self) >= self._most

    @property
    def _most(self) -> int:
        return max(2 * self.batch_size, min(self.capacity, (self.max_staleness + 1) * self.batch_size))

    @property
    def target(self) -> int:
        return min(self.batch_size, len(self)) if self._closed else self.batch_size

    @property
    def rollouts(self) -> Held:
        return Held(self._rollouts.values(), self._rollouts, self._table.view(slice(len(self))))

    @property
    def active(self) -> Held:
        rows = np.flatnonzero(~self._table.columns.finished)
        return Held(self._unfinished.values(), self._rollouts, self._table.view(rows))

    @property
    def sure(self) -> Ints:
        """Ids of the sequences that are certain to be in the next batch."""
        return self._table.columns.at(self._sure()).seq_ids

    def worth_reading(self) -> Ints:
        """Ids that the critic should read now: all, if half of the undecided ones will be in the batch, else the `sure` ones."""
        sure, columns = self._sure(), self._table.columns
        unsure = ~columns.finished
        unsure[sure] = False
        missing, num_unsure = self.target - len(sure), int(unsure.sum())
        if 2 * missing >= num_unsure:
            return columns.at(np.arange(len(self))).seq_ids
        return columns.at(sure).seq_ids

    def admit(self, prompts: Iterable[Prompt]) -> list[Rollout]:
        admitted = [
            Rollout(prompt, number, deferrals=self.pending, recorded=self._recorded)
            for number, prompt in enumerate(prompts, self._num_admitted)
        ]
        assert len(admitted) <= self.room, f"{len(admitted)} prompts admitted into room for {self.room}"
        assert not (self._closed and admitted), "prompts admitted after the end of the prompts"
        new = {rollout.prompt.seq_id: rollout for rollout in admitted}
        assert len(new) == len(admitted), "two of the prompts have the same number"
        known = new.keys() & self._rollouts.keys()
        assert not known, f"sequence {min(known)} is already in the buffer"
        self._rollouts |= new
        self._unfinished |= new
        self._num_admitted += len(new)
        self._table.add(admitted)
        self._ages = np.concatenate([self._ages, np.full(len(admitted) // self.group_size, self.pending)])
        return admitted

    def set_delta(self, delta: int) -> None:
        assert delta >= 0
        self.delta = delta

    def close(self) -> None:
        self._closed = True

    def readiness(self) -> Readiness:
        """Return what the next batch waits for; valid until the buffer changes."""
        finished_G, size = self._finished_groups(), self.group_size
        waits = []
        for members_G, needed in due(self._ages, self.batch_size // size, self.max_staleness):
            if (missing := needed - int((members_G & finished_G).sum())) > 0:
                rows = self._rows_of(np.flatnonzero(members_G & ~finished_G))
                waits.append((self._table.columns.at(rows).seq_ids.tolist(), missing))
        kind = JudgedReadiness if self.filtered else Readiness
        return kind(self.target // size, int(finished_G.sum()), self._unfinished.keys(), waits, size)

    def keep(self, groups: Iterable[int]) -> None:
        assert self.filtered, "keep is called with a filter only"
        self.kept.update(groups)

    def drop(self, groups: Iterable[int]) -> list[Rollout]:
        return self._remove(np.flatnonzero(np.isin(self._numbers(), list(groups))))

    def pass_to(self, clock: int) -> None:
        assert not self._unfinished and clock >= self.clock
        self.clock = clock

    def record(self, chunk: Chunk) -> None:
        """Append a round's tokens. Raises StreamError, before any change, if a row does not continue its rollout."""
        rows = chunk.rows
        if chunk.clock < self.clock:
            where = f"sequence {rows.seq_ids[0]}, offset {rows.offsets[0]}" if len(rows) else "no rows"
            raise StreamError(
                f"chunk {chunk.index} ({where}): its clock is {chunk.clock}, but {self.clock} is already recorded; "
                f"record chunks in the order of decoding"
            )
        places = self._table.rows(rows.seq_ids)
        self._require_order(chunk, places)
        self._recorded.append(rows)
        self._table.columns.response_tokens[places] += rows.counts
        ends = np.flatnonzero(rows.finish_clocks != UNFINISHED)
        self._table.columns.finished[places[ends]] = True
        self._table.finish_clocks[places[ends]] = rows.finish_clocks[ends]
        ended = map(self._unfinished.pop, rows.seq_ids[ends].tolist())
        reasons = map(REASONS.__getitem__, rows.reasons[ends].tolist())
        for rollout, clock, reason in zip(ended, rows.finish_clocks[ends].tolist(), reasons, strict=True):
            rollout.finish_clock, rollout.finish_reason = clock, reason
        self.clock = chunk.clock

    def rewrite(self, rewritten: Sequence[tuple[Rollout, Lists, FinishReason | None]]) -> None:
        """Replace held responses, each with the reason why it ends, or None.  One that keeps its length keeps its clock."""
        columns = self._table.columns
        places = self._table.rows(np.array([rollout.seq_id for rollout, *_ in rewritten], dtype=np.int64))
        for place, (rollout, lists, reason) in zip(places.tolist(), rewritten, strict=True):
            clock = None if reason is None else self.clock
            if reason is not None and rollout.finished and rollout.num_response_tokens == len(lists[0]):
                clock = rollout.finish_clock
            rollout.rewrite(lists, clock, reason)
            columns.response_tokens[place], columns.finished[place] = len(lists[0]), reason is not None
            self._table.finish_clocks[place] = 0 if clock is None else clock
        self._unfinished = {seq_id: held for seq_id, held in self._rollouts.items() if not held.finished}

    def state_dict(self) -> dict[str, Any]:
        return {
            "clock": self.clock, "num_admitted": self._num_admitted, "delta": self.delta, "closed": self._closed,
            "pending": self.pending,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any], rollouts: Iterable[Rollout]) -> None:
        self.clock, self._num_admitted = state["clock"], state["num_admitted"]
        self.delta, self._closed, self.pending = state["delta"], state["closed"], state.get("pending", 0)
        self._rollouts = {rollout.seq_id: rollout for rollout in rollouts}
        self._unfinished = {seq_id: rollout for seq_id, rollout in self._rollouts.items() if not rollout.finished}
        self._table = Table()
        self._table.add(list(self._rollouts.values()))
        self._recorded = []
        for rollout in self._rollouts.values():
            rollout.follow(self._recorded)
        deferrals = [rollout.deferrals for rollout in self._rollouts.values()]
        self._ages = np.array(deferrals[:: self.group_size], dtype=np.int64)
        self.kept = set()

    def take_batch(self) -> Held:
        """Remove and return the batch, ordered by (finish clock, admission)."""
        assert self.readiness().ready, "take_batch before the batch is ready"
        groups = self._foremost_groups()
        batch = self._remove(self._rows_of(groups[np.argsort(self._group_clocks()[groups], kind="stable")]))
        self._ages += 1
        seq_ids = self._table.columns.seq_ids.copy()
        recorded = [rows.at(np.flatnonzero(np.isin(rows.seq_ids, seq_ids))) for rows in self._recorded]
        dropped = next((i for i, rows in enumerate(recorded) if len(rows)), len(recorded))
        self._recorded = recorded[dropped:]  # another list: the batch follows the old one
        for rollout in self._rollouts.values():
            rollout.defer(self._recorded, dropped)
        return batch

    def _remove(self, rows: Ints) -> Held:
        columns, kept = self._table.columns.at(rows), np.ones(len(self), dtype=np.bool_)
        kept[rows] = False
        seq_ids: list[int] = columns.seq_ids.tolist()
        gone = dict(zip(seq_ids, map(self._rollouts.pop, seq_ids), strict=True))
        for seq_id in columns.seq_ids[~columns.finished].tolist():
            del self._unfinished[seq_id]
        self.kept -= {seq_id // self.group_size for seq_id in gone}
        self._table.keep(kept)
        self._ages = self._ages[kept[:: self.group_size]]
        return Held(gone.values(), gone, lambda: columns)

    def _sure(self) -> Ints:
        if len(self) <= self.target and (self._closed or not self.backfill) and not self.filtered:
            return np.arange(len(self))
        rows = self._rows_of(self._foremost_groups())
        return rows[np.isin(self._numbers()[rows], list(self.kept))] if self.filtered else rows

    def _numbers(self) -> Ints:
        return self._table.columns.seq_ids // self.group_size

    def _foremost_groups(self) -> Ints:
        size, finished_G, clocks_G = self.group_size, self._finished_groups(), self._group_clocks()
        batch, target = self.batch_size // size, self.target // size
        return next_groups(finished_G, clocks_G, self._ages, batch, self.max_staleness, target)

    def _finished_groups(self) -> Bools:
        finished: Bools = np.logical_and.reduce(self._table.columns.finished.reshape(-1, self.group_size), axis=1)
        if self.filtered:
            finished &= np.isin(self._numbers()[:: self.group_size], list(self.kept))
        return finished

    def _group_clocks(self) -> Ints:
        clocks: Ints = self._table.finish_clocks.reshape(-1, self.group_size).max(axis=1)
        return clocks

    def _rows_of(self, groups: Ints) -> Ints:
        return (groups[:, None] * self.group_size + np.arange(self.group_size)).flatten()

    def _require_order(self, chunk: Chunk, places: Ints) -> None:
        rows, columns, clocks = chunk.rows, self._table.columns, chunk.rows.finish_clocks
        again = np.ones(len(rows), dtype=np.bool_)
        again[np.unique(places, return_index=True)[1]] = False
        wrong = again | (places < 0)
        known = np.flatnonzero(~wrong)
        held = places[known]
        wrong[known] = columns.finished[held] | (rows.offsets[known] != columns.response_tokens[held])
        wrong |= (clocks != UNFINISHED) & ((clocks < self.clock) | (clocks > chunk.clock))
        if wrong.any():
            first = int(np.argmax(wrong))
            row = rows[first]
            twice = "the sequence has two rows in this chunk; it may have one"
            problem = twice if again[first] else self._problem(row, chunk.clock)
            raise StreamError(f"chunk {chunk.index}, sequence {row.seq_id}, offset {row.offset}: {problem}")

    def _problem(self, row: ChunkRow, clock: int) -> str | None:
        rollout = self._rollouts.get(row.seq_id)
        if rollout is None:
            return "the sequence is not in the buffer; it was never admitted or has already been trained"
        if rollout.finished:
            return f"it finished at clock {rollout.finish_clock} with {rollout.num_response_tokens} tokens; none may follow"
        if row.offset != rollout.num_response_tokens:
            kind = "lost" if row.offset > rollout.num_response_tokens else "repeated"
            return f"the next token has offset {rollout.num_response_tokens}; a chunk was {kind}"
        if row.finish_clock is not None and not self.clock <= row.finish_clock <= clock:
            return f"it finished at clock {row.finish_clock}, outside the round's clocks {self.clock}..{clock}"
        return None
