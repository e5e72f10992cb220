"""Rows of a chunk from all replicas, on each of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from oppo_megatron.chunks import ChunkRows
from oppo_megatron.cluster.gathering import gather_ragged
from oppo_megatron.engine.row_words import from_words, to_words


def gather_rows(rows: ChunkRows, group: dist.ProcessGroup) -> ChunkRows:
    """The rows of all ranks of the group, in their order."""
    mine = torch.from_numpy(to_words(rows))
    return ChunkRows.joined([from_words(words.numpy()) for words in gather_ragged(mine, group)])
