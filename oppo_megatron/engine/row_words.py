"""Rows of a chunk as integers, to the bit, for listening ranks and for the exchange among replicas.

    table    per row: sequence id, offset, tokens, policy version, finish clock or -1, ending
    body     all tokens, then all log-probs, then all sampling log-probs (float64 bits)
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from oppo_megatron.chunks import FIELDS, ChunkRows, Ints
from oppo_megatron.cluster.process_groups import gather_ragged

DRAWN = 3
"""Numbers of a drawn token: itself, its log-prob, its sampling log-prob."""


def to_words(rows: ChunkRows) -> Ints:
    """Encode as number of rows, table, body."""
    rows = rows.packed()
    return np.concatenate([np.array([len(rows)], dtype=np.int64), rows.table.T.reshape(-1), rows.body.reshape(-1)])


def from_words(words: Ints) -> ChunkRows:
    """Decode `to_words`; the tokens are views of `words`."""
    end = 1 + int(words[0]) * FIELDS
    table = np.ascontiguousarray(words[1:end].reshape(-1, FIELDS).T)
    return ChunkRows.packed_as(table, words[end:].reshape(DRAWN, -1))


def gather_rows(rows: ChunkRows, group: dist.ProcessGroup) -> ChunkRows:
    """Rows of all ranks of the group, in the order of ranks."""
    mine = torch.from_numpy(to_words(rows))
    return ChunkRows.joined([from_words(words.numpy()) for words in gather_ragged(mine, group)])
