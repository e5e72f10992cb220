"""Packed tokens: rows own contiguous spans of a 1-D tensor.  T: response tokens, B: rows (responses), N: some of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Lengths = Sequence[int] | Tensor


def lengths_like(x_T: Tensor, lengths_B: Lengths) -> Tensor:
    """int64 on the device of `x_T`, which the spans must cover."""
    result_B = torch.as_tensor(lengths_B, dtype=torch.int64, device=x_T.device)
    assert result_B.dim() == 1 and x_T.dim() == 1, f"packed tensors are 1-D, got {x_T.shape}, lengths {result_B.shape}"
    assert bool((result_B >= 1).all()), f"every response has at least one token, got lengths {result_B.tolist()}"
    assert int(result_B.sum()) == x_T.numel(), f"lengths sum to {int(result_B.sum())}, packed tokens are {x_T.numel()}"
    return result_B


def last_tokens(lengths_B: Tensor) -> Tensor:
    """Packed index of each row's last token, [B]."""
    return lengths_B.cumsum(0) - 1


def tokens_after(lengths_B: Tensor) -> Tensor:
    """Number of tokens after each in its row, [T]."""
    num_tokens = int(lengths_B.sum())
    last_T = last_tokens(lengths_B).repeat_interleave(lengths_B, output_size=num_tokens)
    return last_T - torch.arange(num_tokens, device=lengths_B.device)


def tokens_of_rows(lengths_B: Tensor, rows: Sequence[int]) -> Tensor:
    """Packed indices of the tokens of `rows`, [N]."""
    rows_R = torch.as_tensor(rows, dtype=torch.int64, device=lengths_B.device)
    chosen_R = lengths_B[rows_R]
    num_tokens = int(chosen_R.sum())
    end_N = (last_tokens(lengths_B)[rows_R] + 1).repeat_interleave(chosen_R, output_size=num_tokens)
    return end_N - 1 - tokens_after(chosen_R)


def row_sums(x_T: Tensor, lengths_B: Tensor) -> Tensor:
    """Sum of each row's tokens, [B], without host waits."""
    return torch.segment_reduce(x_T, "sum", lengths=lengths_B, axis=0, unsafe=True)


def to_tokens(x_B: Tensor, lengths_B: Tensor, num_tokens: int) -> Tensor:
    """Repeat each row's value, [T]."""
    return x_B.repeat_interleave(lengths_B, output_size=num_tokens)


@dataclass(frozen=True)
class TokenStats:
    """Sums over tokens (`max_...`: maxima), 0-d float64."""

    num_tokens: Tensor


def total(x_T: Tensor) -> Tensor:
    """Detached, in float64."""
    return x_T.detach().sum(dtype=torch.float64)


def count(x_T: Tensor) -> Tensor:
    return torch.full((), float(x_T.numel()), dtype=torch.float64, device=x_T.device)


def right_share(margin: Tensor, noise: Tensor) -> Tensor:
    """1 above `noise`, 0 below -`noise`, else 1/2."""
    return (margin.greater(noise).double() + margin.greater_equal(-noise).double()) / 2


def rounding(x: Tensor) -> float:
    """Relative error of a model's outputs."""
    return 4 * torch.finfo(x.dtype).eps


def maximum(x_T: Tensor) -> Tensor:
    """Detached; 0 if empty.  `x_T` >= 0."""
    return x_T.detach().double().amax() if x_T.numel() else count(x_T)
