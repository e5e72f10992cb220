from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from oppo_megatron.columns import Ints

Pairs = list[tuple[int, int]]
"""A mapping in JSON: keys stay numbers, in order."""

ABSENT = -1
"""A missing number in columns that use 0."""


class Ledger:
    """Dense columns of integers by sequence id; `entered` shows which are in use."""

    def __init__(self, entered: str, columns: Mapping[str, int]):
        self._entered, self._unset = entered, dict(columns)
        self._first = 0
        self._columns: dict[str, Ints] = {name: np.zeros(0, dtype=np.int64) for name in columns}

    def __getitem__(self, name: str) -> Ints:
        """Return a column, valid until the next call of `rows`."""
        return self._columns[name]

    def rows(self, seq_ids: Ints) -> Ints:
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
