"""The output of a decoding round, in columns.  n: rows, T: tokens; *clock*: see `records.py`."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from oppo_megatron.errors import StreamError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FinishReason = Literal["eos", "stop", "length"]
REASONS: tuple[FinishReason | None, ...] = (None, "eos", "length", "stop")
"""Columns store the index."""

UNFINISHED = -1
"""Finish clock, in columns, of an unfinished response."""

FIELDS = 6
"""Fields of a row: sequence id, offset, tokens, policy version, finish clock, reason."""

NOTHING = np.zeros((3, 0), dtype=np.int64)
"""The body of no tokens."""


@dataclass(slots=True)
class ChunkRow:
    """New tokens of a sequence, from response position `offset` on.

    `routes`: of each token, if kept, the experts that were chosen in each layer when it was drawn (`split_routes`).
    """

    seq_id: int
    offset: int
    tokens: list[int]
    logprobs: list[float]
    sampling_logprobs: list[float]
    version: int
    finish_clock: int | None = None
    finish_reason: FinishReason | None = None
    routes: list[str] = field(default_factory=list)


FREE = ""
"""The route of a token that leaves the choice of experts to the model."""


def split_routes(content: bytes, num_tokens: int) -> list[str]:
    """Return a text of base64 per token; tokens have an equal number of bytes, a multiple of 24."""
    text = b64encode(content).decode()
    size = len(text) // max(num_tokens, 1)
    return [text[place * size :][:size] for place in range(num_tokens if size else 0)]


class ChunkRows:
    """`ChunkRow`s in columns: `table` [FIELDS, n]; `body` [3 + W, T]: tokens, log-probs, sampling log-probs (bits), W words of
    routes; `starts` [n].
    """

    seq_ids: Ints
    offsets: Ints
    counts: Ints  # tokens
    versions: Ints
    finish_clocks: Ints  # UNFINISHED for a response that has not ended
    reasons: Ints  # places in REASONS

    def __init__(self, table: Ints, starts: Ints, body: Ints):
        self.table, self.starts, self.body = table, starts, body
        self.seq_ids, self.offsets, self.counts, self.versions, self.finish_clocks, self.reasons = table

    @classmethod
    def of(cls, rows: ChunkRows | Iterable[ChunkRow]) -> ChunkRows:
        """Raises StreamError if a token lacks a log-prob."""
        if isinstance(rows, ChunkRows):
            return rows
        rows = list(rows)
        for row in rows:
            assert len(row.routes) in (0, len(row.tokens))
            if not len(row.tokens) == len(row.logprobs) == len(row.sampling_logprobs):
                raise StreamError(
                    f"sequence {row.seq_id}, offset {row.offset}: {len(row.tokens)} tokens come with {len(row.logprobs)} "
                    f"log-probs and {len(row.sampling_logprobs)} sampling log-probs; each token needs one of both"
                )
        table = np.array([_fields(row) for row in rows], dtype=np.int64).reshape(-1, FIELDS).T
        tokens = _flat(rows, "tokens", np.int64)
        numbers = [_flat(rows, name, np.float64).view(np.int64) for name in ("logprobs", "sampling_logprobs")]
        routes = np.frombuffer(b64decode("".join(chain.from_iterable(row.routes for row in rows))), dtype=np.int64)
        return cls.packed_as(table, np.stack([tokens, *numbers, *routes.reshape(len(tokens), -1).T]) if len(tokens) else NOTHING)

    @classmethod
    def packed_as(cls, table: Ints, body: Ints) -> ChunkRows:
        counts = table[2]
        return cls(table, np.cumsum(counts) - counts, body)

    @classmethod
    def joined(cls, parts: Sequence[ChunkRows]) -> ChunkRows:
        if len(parts) == 1:
            return parts[0]
        sizes = np.array([part.body.shape[1] for part in parts], dtype=np.int64)
        before = (np.cumsum(sizes) - sizes).tolist()
        return cls(
            np.concatenate([part.table for part in parts], axis=1),
            np.concatenate([part.starts + start for part, start in zip(parts, before, strict=True)]),
            np.concatenate([part.body for part in parts if part.body.shape[1]] or [NOTHING], axis=1),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    def __len__(self) -> int:
        return len(self.seq_ids)

    def __iter__(self) -> Iterator[ChunkRow]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, position: int) -> ChunkRow:
        seq_id, offset, count, version, finish, reason = self.table[:, position].tolist()
        start = int(self.starts[position])
        tokens, logprobs, sampling, *routes = self.body[:, start : start + count]
        return ChunkRow(
            seq_id, offset, tokens.tolist(), logprobs.view(np.float64).tolist(), sampling.view(np.float64).tolist(),
            version, None if finish == UNFINISHED else finish, REASONS[reason],
            split_routes(np.array(routes).T.tobytes(), count) if routes else [],
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkRows | Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))

    def at(self, positions: Ints | Sequence[int]) -> ChunkRows:
        """Rows, without copying tokens."""
        positions = np.asarray(positions, dtype=np.int64)
        return ChunkRows(self.table[:, positions], self.starts[positions], self.body)

    def cut(self, keep: int) -> ChunkRows:
        """Keep at most `keep` tokens of a row, which then has not ended."""
        table, longer = self.table.copy(), self.counts > keep
        table[2, longer], table[4, longer], table[5, longer] = keep, UNFINISHED, 0
        return ChunkRows(table, self.starts, self.body)

    def packed(self) -> ChunkRows:
        """Copy only the rows' tokens."""
        ends = np.cumsum(self.counts)
        starts = ends - self.counts
        if (starts == self.starts).all() and self.num_tokens == self.body.shape[1]:
            return self
        places = np.repeat(self.starts - starts, self.counts) + np.arange(self.num_tokens)
        return ChunkRows(self.table, starts, self.body[:, places])

    def place(self, seq_id: int) -> int | None:
        if not len(self):
            return None
        at = min(int(np.searchsorted(self.seq_ids, seq_id, sorter=self._by_id)), len(self) - 1)
        found = int(self._by_id[at])
        return found if self.seq_ids[found] == seq_id else None

    @cached_property
    def _by_id(self) -> Ints:
        return np.argsort(self.seq_ids)


class Orders(IntFlag):
    """Acts of every rank after a round: stop, or install weights that have arrived."""

    NONE = 0
    HALT = 1
    INSTALL = 2


@dataclass(init=False)
class Chunk:
    """Output of a decoding round."""

    index: int
    clock: int
    rows: ChunkRows
    orders: Orders

    def __init__(self, index: int, clock: int, rows: ChunkRows | Iterable[ChunkRow] = (), orders: Orders = Orders.NONE):
        self.index, self.clock, self.rows, self.orders = index, clock, ChunkRows.of(rows), orders


def _fields(row: ChunkRow) -> tuple[int, ...]:
    finish = UNFINISHED if row.finish_clock is None else row.finish_clock
    return row.seq_id, row.offset, len(row.tokens), row.version, finish, REASONS.index(row.finish_reason)


def _flat(rows: Sequence[ChunkRow], name: str, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    return np.array(list(chain.from_iterable(map(attrgetter(name), rows))), dtype=dtype)


class StopSignal(Protocol):
    """`finish` reports finished sequences; `ready` if the batch is complete."""

    @property
    def ready(self) -> bool: ...

    def finish(self, *seq_ids: int) -> None: ...


def merge_rows(index: int, start: int, rows: ChunkRows | Iterable[ChunkRow], stop: StopSignal) -> Chunk:
    """Merge replicas' rows as one process would decode them; token k has the clock `start + 1 + k`.  Cut at the first `ready`."""
    rows = ChunkRows.of(rows)
    filled = np.flatnonzero(rows.counts)
    rows = rows.at(filled[np.argsort(rows.seq_ids[filled], kind="stable")])
    ended = np.flatnonzero(rows.finish_clocks != UNFINISHED)
    ended = ended[np.argsort(rows.finish_clocks[ended], kind="stable")]
    clocks, seq_ids = rows.finish_clocks[ended], rows.seq_ids[ended].tolist()
    clock = start + int(rows.counts.max(initial=0))
    for first, end in pairwise([*np.flatnonzero(np.diff(clocks, prepend=UNFINISHED)).tolist(), len(seq_ids)]):
        stop.finish(*seq_ids[first:end])
        if stop.ready:
            clock = int(clocks[first])
            break
    return Chunk(index, clock, rows.cut(clock - start))
