"""Attention through a sliding window: a token attends to itself and to the `window` - 1 tokens before it.

Queries are computed in pieces, so that each reads few keys beyond its window and masks stay small.

Legend: Q queries of a piece, K keys of a piece, N query heads, G key/value heads, T new tokens, L cached positions, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

LEAST_PIECE, MOST_PIECE = 64, 1024
"""Queries of a piece: as many as the window has, within these bounds."""

Core = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(queries [1, N, Q, D], keys and values [1, G, K, D], mask [Q, K]) -> [1, N, Q, D]."""


def binding(window: int | None, reach: int) -> int | None:
    """The window if it excludes some of `reach` positions; else None."""
    return window if window is not None and window < reach else None


@dataclass
class WindowedAttention:
    """Attention of a call's sequences, with the masks that its layers share."""

    dtype: torch.dtype
    device: torch.device
    _masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def attend(self, core: Core, q_1NTD: Tensor, k_1GLD: Tensor, v_1GLD: Tensor, window: int) -> Tensor:
        """The queries are the last T of L positions -> [1, N, T, D]."""
        new, reach = q_1NTD.shape[2], k_1GLD.shape[2]
        outputs = []
        for queries, keys in _pieces(new, reach, window):
            mask_QK = self._mask(queries.stop - queries.start, keys.stop - keys.start, window)
            outputs.append(core(q_1NTD[:, :, queries], k_1GLD[:, :, keys], v_1GLD[:, :, keys], mask_QK))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _mask(self, queries: int, keys: int, window: int) -> Tensor:
        """0 or minus infinity.  The last key is the last query's own."""
        key = (queries, keys, window)
        if key not in self._masks:
            own = keys - queries  # the key of the first query
            behind_QK, before_QK = (
                torch.full((queries, keys), -torch.inf, dtype=self.dtype, device=self.device) for _ in range(2)
            )
            self._masks[key] = behind_QK.triu_(own + 1) + before_QK.tril_(own - window)
        return self._masks[key]


def _pieces(new: int, reach: int, window: int) -> Iterator[tuple[slice, slice]]:
    """Queries of the last `new` of `reach` positions, and the keys that at least one of them attends to."""
    size, past = min(max(window, LEAST_PIECE), MOST_PIECE), reach - new
    for first in range(0, new, size):
        stop = min(first + size, new)
        yield slice(first, stop), slice(max(0, past + first + 1 - window), past + stop)
