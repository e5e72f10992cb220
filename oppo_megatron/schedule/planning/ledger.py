"""Numbers of sequences by sequence id, in arrays: what the books keep of thousands of them.

Sequence ids are positions in a stream, and those in use lie close together.  So a number is found at (id - first id) of its
column, and columns are as long as the ids in use are apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from oppo_megatron.columns import Ints

ABSENT = -1
"""The number of a sequence that has none, in columns in which 0 means something."""


class Ledger:
    """Columns by name, each with the number that a sequence has which is not entered.

    A sequence is in use while its number in the column `entered` differs from that of one that is not.
    """

    def __init__(self, entered: str, columns: Mapping[str, int]):
        self._entered, self._unset = entered, dict(columns)
        self._first = 0
        self._columns: dict[str, Ints] = {name: np.zeros(0, dtype=np.int64) for name in columns}

    def __getitem__(self, name: str) -> Ints:
        """A column, to be read and written at what `rows` gives; it is valid until the next call of `rows`."""
        return self._columns[name]

    def rows(self, seq_ids: Ints) -> Ints:
        """Where in the columns the sequences' numbers stand, known or not."""
        if len(seq_ids):
            low, high = int(seq_ids.min()), int(seq_ids.max())
            if low < self._first or high >= self._first + len(self):
                self._make_room(low, high)
        return seq_ids - self._first

    def ids(self, rows: Ints) -> Ints:
        """Whose numbers stand at these rows."""
        return rows + self._first

    def row(self, seq_id: int) -> int:
        """The row of a single sequence that is in use.  Raises KeyError for others."""
        row = seq_id - self._first
        if not (0 <= row < len(self) and self._columns[self._entered][row] != self._unset[self._entered]):
            raise KeyError(seq_id)
        return row

    def __contains__(self, seq_id: int) -> bool:
        row, column = seq_id - self._first, self._columns[self._entered]
        return 0 <= row < len(column) and bool(column[row] != self._unset[self._entered])

    def __len__(self) -> int:
        return len(self._columns[self._entered])

    def where(self, mask: npt.NDArray[np.bool_]) -> Ints:
        """Ids of the rows in which `mask` is True, ascending."""
        return self.ids(np.flatnonzero(mask))

    def enter(self, name: str, pairs: Sequence[tuple[int, int]]) -> Ints:
        """Set the numbers of sequences, (id, number) each.  Returns their rows."""
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        rows = self.rows(table[:, 0])
        self[name][rows] = table[:, 1]
        return rows

    def clear(self) -> None:
        """No sequence is in use any more."""
        for name, unset in self._unset.items():
            self._columns[name][:] = unset

    def _make_room(self, low: int, high: int) -> None:
        """For ids low .. high, beside those in use; with as much room again behind them, so that this is rare."""
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


def ordinal(homes: Ints) -> Ints:
    """How many of the same home stand before each."""
    order = np.argsort(homes, kind="stable")
    ordered = homes[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(homes) else order
    lengths = np.diff(np.append(starts, len(homes)))
    found = np.empty_like(homes)
    found[order] = np.arange(len(homes)) - np.repeat(starts, lengths)
    return found
