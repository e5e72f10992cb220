"""Numbers of the host for a device, copied while the host goes on.

From ordinary memory CUDA copies only once everything that the stream was given before is done, and the host waits for it; from
pinned memory the copy takes its turn in the stream.  torch's allocator gives a pinned block to nobody else before it is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of the host, or numbers that become one of `dtype`, on the device; a tensor that is there already as it is."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
