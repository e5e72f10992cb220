"""The tensor ranks among which the vocabulary is divided, evenly and in order.

Legend: R rows, V tokens of a shard, S shards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class VocabShards:
    """This rank's place among the shards.  Without a group the only shard is the whole vocabulary."""

    def __init__(self, group: dist.ProcessGroup | None = None, num_tokens: int = 0):
        """`num_tokens` is V."""
        self._group, self._num_tokens = group, num_tokens
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()

    def globally(self, tokens: Tensor) -> Tensor:
        """Tokens of this shard by their number in the vocabulary."""
        return tokens + self.rank * self._num_tokens

    def gather(self, mine: Tensor) -> Tensor:
        """What all ranks have, stacked in their order: [S, ...]."""
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine.contiguous(), group=self._group)
        return torch.stack(found)

    def add(self, mine: Tensor) -> Tensor:
        """The sum over the ranks.  `mine` is overwritten."""
        dist.all_reduce(mine, group=self._group)
        return mine
