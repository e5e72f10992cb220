"""The gap between a token's log-probs at decoding and in training, compared with rounding errors.  R: tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_megatron.config.reliability import APART, GuardsConfig

USUAL_LOGIT = 16.0
"""Limits hold up to twice this size of a token's largest logit, and double with it."""
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
    """Sums and maxima for `judged_gap`; log-probs in training - at decoding, `fresh_R`: 1 for equal weights."""
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
    """Rounding error relative to usual logits', a power of two, [R]."""
    return torch.exp2((largest_R.double() / USUAL_LOGIT).clamp(min=1.0).log2().floor())
