"""Statistics that add up over micro-batches, minibatches and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenStats:
    """Sums over tokens, each a detached 0-d float64 tensor; a field named `max_...` is a maximum instead."""

    num_tokens: Tensor


def total(x_T: Tensor) -> Tensor:
    """Detached sum in double precision, so that long runs of micro-batches lose nothing."""
    return x_T.detach().sum(dtype=torch.float64)


def count(x_T: Tensor) -> Tensor:
    """Number of tokens as a 0-d float64 tensor on the device of `x_T`."""
    return torch.full((), float(x_T.numel()), dtype=torch.float64, device=x_T.device)  # made there, not copied


def right_share(margin: Tensor, noise: Tensor) -> Tensor:
    """How much each margin counts as on its right side (float64): 1 above `noise`, 0 below -`noise`, 1/2 between.

    A margin that rounding alone could make has no side: its sign would change with the processor, the layout and the packing.
    """
    return (margin.greater(noise).double() + margin.greater_equal(-noise).double()) / 2


def rounding(x: Tensor) -> float:
    """Error of a model's outputs by rounding, as a share of their size: some roundings of their type."""
    return 4 * torch.finfo(x.dtype).eps


def maximum(x_T: Tensor) -> Tensor:
    """Detached largest element of non-negative `x_T`; 0 where there is no token (a rank without rows)."""
    return x_T.detach().double().amax() if x_T.numel() else count(x_T)
