"""Packed tokens: rows own contiguous spans of a 1-D tensor; gaps between log-probs at decoding and in training.

T: response tokens, B: rows (responses), N: some of the tokens, R: tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_megatron.config.reliability import APART, GuardsConfig

Lengths = Sequence[int] | Tensor


def lengths_like(x_T: Tensor, lengths_B: Lengths) -> Tensor:
    """Return the lengths as int64 on the device of `x_T`; they must add up to its size."""
    result_B = torch.as_tensor(lengths_B, dtype=torch.int64, device=x_T.device)
    assert result_B.dim() == 1 and x_T.dim() == 1, f"packed tensors are 1-D, got {x_T.shape}, lengths {result_B.shape}"
    assert bool((result_B >= 1).all()), f"every response has at least one token, got lengths {result_B.tolist()}"
    assert int(result_B.sum()) == x_T.numel(), f"lengths sum to {int(result_B.sum())}, packed tokens are {x_T.numel()}"
    return result_B


def last_tokens(lengths_B: Tensor) -> Tensor:
    """Packed index of each row's last token, [B]."""
    return lengths_B.cumsum(0) - 1


def tokens_after(lengths_B: Tensor) -> Tensor:
    """Number of later tokens in the same row, [T]."""
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
    """1 if right (above `noise`), 0 if wrong (below -`noise`), else 1/2."""
    return (margin.greater(noise).double() + margin.greater_equal(-noise).double()) / 2


def rounding(x: Tensor) -> float:
    """Relative error of a model's outputs."""
    return 4 * torch.finfo(x.dtype).eps


def maximum(x_T: Tensor) -> Tensor:
    """Detached; 0 if empty.  `x_T` >= 0."""
    return x_T.detach().double().amax() if x_T.numel() else count(x_T)


USUAL_LOGIT = 16.0
"""Limits hold while a token's largest logit is below twice this size, and double each time that it doubles."""
OUTLIERS, FARTHEST = 1e-3, 4.0
"""Share of tokens that may exceed the limit, and the largest factor."""
GAP_STATS = ("max_logprob_gap", "max_usual_gap", "num_fresh", "num_beyond")


@dataclass(frozen=True)
class GapLimit:
    """`nats`: largest difference (None: any); with `by_rounding`, outliers and large logits may exceed it."""

    nats: float | None = None
    by_rounding: bool = False

    @classmethod
    def of(cls, guards: GuardsConfig, dtype: str, temperature: float) -> GapLimit:
        return cls(guards.gap_limit(dtype, temperature), by_rounding=guards.logprob_gap == "auto")


def gap_stats(difference_R: Tensor, largest_R: Tensor, fresh_R: Tensor, limit: GapLimit) -> dict[str, Tensor]:
    """Sums and maxima for `judged_gap`.  `difference_R`: log-prob in training - at decoding; `fresh_R`: 1 for equal weights."""
    gap_R = difference_R.double().abs() * fresh_R
    usual_R = gap_R / rounding_scale(largest_R)
    beyond_R = usual_R > (limit.nats or torch.inf)
    return {
        "max_logprob_gap": gap_R.amax(),
        "max_usual_gap": usual_R.amax(),
        "num_fresh": fresh_R.sum(dtype=torch.float64),
        "num_beyond": beyond_R.sum(dtype=torch.float64),
    }


def token_noise(dtype: str) -> float:
    """Bound (nats) of a log-prob's rounding error (measured: 3e-6 in float32, 0.08 in bfloat16); n tokens: times sqrt(n)."""
    return APART[dtype] / 4


def judged_gap(limit: GapLimit, *, max_logprob_gap: float, max_usual_gap: float, num_fresh: float, num_beyond: float) -> float:
    """Above `limit.nats` if and only if the gap exceeds the limit."""
    if not limit.by_rounding:
        return max_logprob_gap
    return max_usual_gap / FARTHEST if num_beyond <= OUTLIERS * num_fresh else max_usual_gap


def rounding_scale(largest_R: Tensor) -> Tensor:
    """Rounding error relative to the error at usual logits, a power of two, [R]."""
    return torch.exp2((largest_R.double() / USUAL_LOGIT).clamp(min=1.0).log2().floor())
