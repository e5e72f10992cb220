"""The gap between the log-probs of decoding and of training for the same tokens, compared with rounding errors.

The rounding error of a logit grows with its size: an offset that is common to all logits of a token changes no probability,
but it changes the rounding.

Legend: R tokens, V vocabulary shard of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_megatron.config.reliability import APART, GuardsConfig

USUAL_LOGIT = 16.0
"""Up to twice this size of a token's largest logit a limit holds as it is; it doubles with each doubling beyond."""
OUTLIERS, FARTHEST = 1e-3, 4.0
"""So large a share of the tokens may be beyond the limit, by at most this factor."""


GAP_STATS = ("max_logprob_gap", "max_usual_gap", "num_fresh", "num_beyond")


@dataclass(frozen=True)
class GapLimit:
    """`nats` is the largest difference that is allowed (None: any).  `by_rounding`: of all tokens but outliers, and more of
    tokens whose logits are larger than usual; else of every token."""

    nats: float | None = None
    by_rounding: bool = False

    @classmethod
    def of(cls, guards: GuardsConfig, dtype: str, temperature: float) -> GapLimit:
        """That of an actor of `dtype` which samples at `temperature`."""
        return cls(guards.gap_limit(dtype, temperature), by_rounding=guards.logprob_gap == "auto")


def gap_stats(difference_R: Tensor, largest_R: Tensor, fresh_R: Tensor, limit: GapLimit) -> dict[str, Tensor]:
    """Sums and maxima over tokens (as `TokenStats` has them) for `judged_gap`.

    `difference_R` is log-prob in training - at decoding, `largest_R` the largest absolute logit, `fresh_R` 1 where both were
    computed with the same weights and 0 elsewhere.
    """
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
    """Nats: a bound of what rounding makes of a difference of log-probs, a token; of n tokens together sqrt(n) times this.

    A quarter of what a single token may be apart.  Measured (policy equal to reference, other layouts and packings): at most
    3e-6 in float32 and 0.08 in bfloat16, root mean square 1e-6 and 0.035.
    """
    return APART[dtype] / 4


def judged_gap(
    limit: GapLimit, *, max_logprob_gap: float, max_usual_gap: float, num_fresh: float, num_beyond: float
) -> float:
    """Return a number above `limit.nats` exactly if decoding and training are farther apart than the limit allows."""
    if not limit.by_rounding:
        return max_logprob_gap
    return max_usual_gap / FARTHEST if num_beyond <= OUTLIERS * num_fresh else max_usual_gap


def rounding_scale(largest_R: Tensor) -> Tensor:
    """Return the rounding error of logits of this size over the error of usual ones, a power of two of at least 1, [R]."""
    return torch.exp2((largest_R.double() / USUAL_LOGIT).clamp(min=1.0).log2().floor())
