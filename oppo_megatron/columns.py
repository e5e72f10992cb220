"""Rollouts in columns, [n rollouts] each, for planning over thousands of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from oppo_megatron.chunks import Bools as Bools
from oppo_megatron.chunks import Ints as Ints
from oppo_megatron.records import Rollout


class Columns(NamedTuple):
    seq_ids: Ints
    prompt_tokens: Ints
    response_tokens: Ints
    finished: Bools

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Columns:
        return cls(
            np.array([r.prompt.seq_id for r in rollouts], dtype=np.int64),
            np.array([len(r.prompt.tokens) for r in rollouts], dtype=np.int64),
            np.array([r.num_response_tokens for r in rollouts], dtype=np.int64),
            np.array([r.finish_clock is not None for r in rollouts], dtype=np.bool_),
        )

    @property
    def num_tokens(self) -> Ints:
        return self.prompt_tokens + self.response_tokens

    def at(self, rows: Ints | Bools | slice) -> Columns:
        if not isinstance(rows, slice) and rows.dtype == np.bool_:
            rows = np.flatnonzero(rows)  # once, not for each column
        return Columns(self.seq_ids[rows], self.prompt_tokens[rows], self.response_tokens[rows], self.finished[rows])


class Held(list[Rollout]):
    """Rollouts with their columns.  `by_id` may contain others."""

    def __init__(self, rollouts: Iterable[Rollout], by_id: Mapping[int, Rollout], view: Callable[[], Columns | None]):
        super().__init__(rollouts)
        self.by_id = by_id
        self._view = view

    def columns(self) -> Columns:
        found = self._view()
        return Columns.of(self) if found is None else found


def columns_of(rollouts: Sequence[Rollout] | Columns) -> Columns:
    if isinstance(rollouts, Columns):
        return rollouts
    return rollouts.columns() if isinstance(rollouts, Held) else Columns.of(rollouts)


class Table:
    """Columns of rollouts; dropping rows invalidates row indices."""

    def __init__(self) -> None:
        self.num_dropped = self._first = 0
        self._by_id: Ints | None = None  # rows by sequence id, from the first id on; -1 for one that is absent
        self._size = 0
        self._room = _empty(64)
        self._finish = np.zeros(64, dtype=np.int64)

    @property
    def columns(self) -> Columns:
        """All rows, which change with the table."""
        return self._room.at(slice(self._size))

    @property
    def finish_clocks(self) -> Ints:
        """Meaningless for unfinished rollouts."""
        return self._finish[: self._size]

    def view(self, rows: Ints | slice) -> Callable[[], Columns | None]:
        """Return the current columns at `rows`; None after rows were dropped."""
        since = self.num_dropped

        def columns() -> Columns | None:
            if since != self.num_dropped:
                return None
            found = self.columns.at(rows)
            return Columns(*(column.copy() for column in found)) if isinstance(rows, slice) else found

        return columns

    def rows(self, seq_ids: Ints) -> Ints:
        """Rows of the sequences; -1 if absent."""
        if not self._size:
            return np.full(len(seq_ids), -1, dtype=np.int64)
        known = self.columns.seq_ids
        if self._by_id is None:
            self._first = int(known.min())
            self._by_id = np.full(int(known.max()) - self._first + 2, -1, dtype=np.int64)  # the last is of all ids beyond
            self._by_id[known - self._first] = np.arange(self._size)
        return self._by_id[np.clip(seq_ids - self._first, -1, len(self._by_id) - 1)]

    def add(self, rollouts: Sequence[Rollout]) -> None:
        columns = Columns.of(rollouts)
        finish_clocks = np.array([r.finish_clock or 0 for r in rollouts], dtype=np.int64)
        self._by_id = None
        end = self._size + len(finish_clocks)
        if end > len(self._finish):
            room, finish = _empty(2 * end), np.zeros(2 * end, dtype=np.int64)
            for new, old in zip((*room, finish), (*self.columns, self.finish_clocks), strict=True):
                new[: self._size] = old
            self._room, self._finish = room, finish
        for column, values in zip(self._room, columns, strict=True):
            column[self._size : end] = values
        self._finish[self._size : end] = finish_clocks
        self._size = end

    def keep(self, mask: Bools) -> None:
        kept = [column[mask] for column in (*self.columns, self.finish_clocks)]
        self._by_id = None
        self._size, self.num_dropped = int(mask.sum()), self.num_dropped + 1
        for column, values in zip((*self._room, self._finish), kept, strict=True):
            column[: self._size] = values


def _empty(size: int) -> Columns:
    seq_ids, prompts, responses = (np.zeros(size, dtype=np.int64) for _ in range(3))
    return Columns(seq_ids, prompts, responses, np.zeros(size, dtype=np.bool_))
