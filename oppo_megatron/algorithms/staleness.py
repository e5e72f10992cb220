"""The denominator of the ratio for tokens that an older policy sampled.

Legend: T response tokens (packed).  Behaviour: the policy that sampled a token.  Proximal: the policy at the step's
start.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from oppo_megatron.algorithms.losses import log_ratios
from oppo_megatron.config.algorithm import Ratio

WEIGHT_CAP = 2.0
"""Largest importance weight of a token (`ppo.staleness: decoupled`)."""


def ratio_base(
    behaviour_logp_T: Tensor,
    proximal_logp_T: Tensor | None,
    correction: Literal["behaviour", "decoupled"],
    ratio: Ratio = "token",
    lengths_B: Tensor | None = None,
    weight_cap: float = WEIGHT_CAP,
) -> tuple[Tensor, Tensor | None]:
    """The log-probs that PPO's ratio is taken against and each token's importance weight, both [T], without gradient.

    behaviour: the log-probs recorded at sampling, no weight.
    decoupled: the proximal log-probs, recomputed once at the step's start, and min(proximal / behaviour,
    `weight_cap`) as weight (decoupled PPO: Hilton et al. 2022, AReaL 2025).  Clipping is then about the policy that
    the step began with, not about one that may be far behind; the cap bounds the variance of tokens whose behaviour
    made them unlikely.  Where the `ratio` is a response's, of `lengths_B` tokens, so is the weight.

    With no stale token (proximal equals behaviour) both are plain PPO, to the last bit.
    """
    if correction == "behaviour":
        return behaviour_logp_T.detach(), None
    assert proximal_logp_T is not None, "correction 'decoupled' needs the log-probs recomputed at the step's start"
    proximal_logp_T = proximal_logp_T.detach()
    weight_T = log_ratios(proximal_logp_T, behaviour_logp_T.detach(), ratio, lengths_B).exp().clamp(max=weight_cap)
    return proximal_logp_T, weight_T
