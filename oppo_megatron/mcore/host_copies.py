"""Copies numbers from the host to a device without blocking the host.

From ordinary memory CUDA copies after all earlier work of the stream, and the host waits; from pinned memory the copy is queued
in the stream.  torch's allocator does not reuse a pinned block before it is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy a tensor, or numbers as a tensor of `dtype`, to the device; a tensor that is there already is returned as is."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
