"""Rows of a chunk as integers, to the bit: to ranks that listen, and among the replicas that have decoded them.

    table    per row: sequence id, offset, tokens, policy version, finish clock or -1, ending
    body     all tokens, then all log-probs, then all sampling log-probs (float64 bits)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from oppo_megatron.records import ChunkRow, FinishReason

Words = npt.NDArray[np.int64]

DRAWN = 3
"""Numbers of a drawn token: itself, its log-prob, its sampling log-prob."""

FIELDS = 6
REASONS: tuple[FinishReason | None, ...] = (None, "eos", "length", "stop")


def fields_of(row: ChunkRow) -> list[int]:
    """The row's line of the table."""
    finish = -1 if row.finish_clock is None else row.finish_clock
    return [row.seq_id, row.offset, len(row.tokens), row.version, finish, REASONS.index(row.finish_reason)]


def body_of(rows: Sequence[ChunkRow]) -> Words:
    """[3 x tokens of all rows]"""
    tokens = np.array([t for row in rows for t in row.tokens], dtype=np.int64)
    logprobs = [np.array([x for row in rows for x in row.logprobs], dtype=np.float64)]
    logprobs += [np.array([x for row in rows for x in row.sampling_logprobs], dtype=np.float64)]
    return np.concatenate([tokens, *(x.view(np.int64) for x in logprobs)])


def row_of(fields: Sequence[int], body: Words, start: int) -> ChunkRow:
    """The row of a line of the table.  `body`: [3, tokens of all rows], of which the row's begin at `start`."""
    seq_id, offset, count, version, finish, reason = fields
    tokens, logprobs, sampling = (body[k, start : start + count] for k in range(3))
    return ChunkRow(
        seq_id, offset, tokens.tolist(), logprobs.view(np.float64).tolist(), sampling.view(np.float64).tolist(),
        version, None if finish < 0 else finish, REASONS[reason],
    )  # fmt: skip


def to_words(rows: Sequence[ChunkRow]) -> Words:
    """Number of rows, table, body."""
    table = np.array([fields_of(row) for row in rows], dtype=np.int64).reshape(-1)
    return np.concatenate([np.array([len(rows)], dtype=np.int64), table, body_of(rows)])


def from_words(words: Words) -> list[ChunkRow]:
    """The rows that `to_words` wrote."""
    end = 1 + int(words[0]) * FIELDS
    table, body = words[1:end].reshape(-1, FIELDS), words[end:].reshape(3, -1)
    starts = np.cumsum(table[:, 2]) - table[:, 2]
    return [row_of(fields, body, start) for fields, start in zip(table.tolist(), starts.tolist(), strict=True)]
