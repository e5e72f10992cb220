"""Rows of a chunk as integers, to the bit: to ranks that listen, and among the replicas that have decoded them.

    table    per row: sequence id, offset, tokens, policy version, finish clock or -1, ending
    body     all tokens, then all log-probs, then all sampling log-probs (float64 bits)
"""

from __future__ import annotations

import numpy as np

from oppo_megatron.chunks import FIELDS, ChunkRows, Ints

DRAWN = 3
"""Numbers of a drawn token: itself, its log-prob, its sampling log-prob."""


def to_words(rows: ChunkRows) -> Ints:
    """Number of rows, table, body."""
    rows = rows.packed()
    return np.concatenate([np.array([len(rows)], dtype=np.int64), rows.table.T.reshape(-1), rows.body.reshape(-1)])


def from_words(words: Ints) -> ChunkRows:
    """The rows that `to_words` wrote; their tokens stay in `words`."""
    end = 1 + int(words[0]) * FIELDS
    table = np.ascontiguousarray(words[1:end].reshape(-1, FIELDS).T)
    return ChunkRows.packed_as(table, words[end:].reshape(DRAWN, -1))
