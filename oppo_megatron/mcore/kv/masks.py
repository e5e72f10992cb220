"""Which cached positions a token does not see.

Legend: S sequences, L cached positions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hidden_keys(position: Tensor, keys: slice, window: int | None) -> Tensor:
    """[..., L]: which of the cached positions `keys` a token at `position` [...] does not attend to.

    Each attends to one at the least, also where it stands behind all of them, as those do that only fill up a call.
    """
    key_L, position_1 = torch.arange(keys.start, keys.stop, device=position.device), position.unsqueeze(-1)
    beyond = key_L > position_1
    return beyond if window is None else beyond | (key_L <= (position_1 - window).clamp(max=keys.stop - 2))


def beyond_mask(position_S: Tensor, keys: slice, dtype: torch.dtype, window: int | None) -> Tensor:
    """[S, 1, 1, L]: 0 up to a sequence's position, no further back than its window, and minus infinity elsewhere."""
    hidden_SL = hidden_keys(position_S, keys, window)
    mask_SL = torch.zeros(hidden_SL.shape, dtype=dtype, device=position_S.device)
    return mask_SL.masked_fill_(hidden_SL, -torch.inf)[:, None, None]
