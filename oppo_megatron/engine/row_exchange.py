"""Rows of a chunk from all replicas, on each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from oppo_megatron.cluster.gathering import gather_ragged
from oppo_megatron.engine.row_words import from_words, to_words
from oppo_megatron.records import ChunkRow


def gather_rows(rows: Sequence[ChunkRow], group: dist.ProcessGroup) -> list[ChunkRow]:
    """The rows of all ranks of the group, in their order."""
    mine = torch.from_numpy(to_words(rows))
    return [row for words in gather_ragged(mine, group) for row in from_words(words.numpy())]
