"""The tensor ranks that share the vocabulary, in order, each with the same number of rows of embedding and output layer.

If the vocabulary does not divide evenly, the last rank has padding rows.

Legend: R rows, V tokens of this rank's shard, S shards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class VocabShards:
    """This rank's shard.  Without a group the only shard is the whole vocabulary."""

    def __init__(self, group: dist.ProcessGroup | None = None, rows: int = 0, vocab_size: int | None = None):
        """`rows`: per rank; `vocab_size`: if it is less than the rows of all ranks."""
        self.group, self.rows, self.vocab_size = group, rows, vocab_size
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.num_tokens = rows if vocab_size is None else min(rows, vocab_size - self.first)
        assert self.num_tokens > 0 or group is None, f"no token of {vocab_size} on rank {self.rank} of {self.size}"

    @property
    def first(self) -> int:
        """Id of this shard's first token."""
        return self.rank * self.rows

    def of_tokens(self, rows_RV: Tensor) -> Tensor:
        """Drop the last shard's padding columns."""
        return rows_RV if self.num_tokens == self.rows else rows_RV[..., : self.num_tokens]

    def filled_up(self, logits_RV: Tensor) -> Tensor:
        """Pad to the other ranks' width, with logits that are never drawn."""
        missing = self.rows - self.num_tokens
        return F.pad(logits_RV, (0, missing), value=-torch.inf) if missing and self.size > 1 else logits_RV

    def globally(self, tokens: Tensor) -> Tensor:
        """Vocabulary ids of this shard's tokens."""
        return tokens + self.first

    def gather(self, mine: Tensor) -> Tensor:
        """Tensors of all ranks, stacked in their order: [S, ...]."""
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine.contiguous(), group=self.group)
        return torch.stack(found)

    def add(self, mine: Tensor) -> Tensor:
        """The sum over the ranks.  `mine` is overwritten."""
        dist.all_reduce(mine, group=self.group)
        return mine
