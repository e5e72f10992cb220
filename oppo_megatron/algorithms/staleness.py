"""Tokens that an older policy sampled: what the ratio is taken against, and how much is left of the batch.

Legend: T response tokens (packed).  Behaviour: the policy that sampled a token.  Proximal: the policy at the step's
start.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

WEIGHT_CAP = 2.0
"""Largest importance weight of a token (`ppo.staleness: decoupled`)."""


def ratio_base(
    behaviour_logp_T: Tensor,
    proximal_logp_T: Tensor | None,
    correction: Literal["behaviour", "decoupled"],
    weight_cap: float = WEIGHT_CAP,
) -> tuple[Tensor, Tensor | None]:
    """The log-probs that PPO's ratio is taken against and each token's importance weight, both [T], without gradient.

    behaviour: the log-probs recorded at sampling, no weight.
    decoupled: the proximal log-probs, recomputed once at the step's start, and min(proximal / behaviour,
    `weight_cap`) as weight (decoupled PPO: Hilton et al. 2022, AReaL 2025).  Clipping is then about the policy that
    the step began with, not about one that may be far behind; the cap bounds the variance of tokens whose behaviour
    made them unlikely.

    With no stale token (proximal equals behaviour) both are plain PPO, to the last bit.
    """
    if correction == "behaviour":
        return behaviour_logp_T.detach(), None
    assert proximal_logp_T is not None, "correction 'decoupled' needs the log-probs recomputed at the step's start"
    proximal_logp_T = proximal_logp_T.detach()
    weight_T = (proximal_logp_T - behaviour_logp_T.detach()).exp().clamp(max=weight_cap)
    return proximal_logp_T, weight_T


def effective_sample_size(log_ratio_T: Tensor) -> float:
    """Kish's effective sample size of the weights exp(log_ratio), as a share of the tokens: in (0, 1], 1 if alike."""
    assert log_ratio_T.numel() > 0, "effective sample size of no tokens"
    log_ratio_T = log_ratio_T.detach().double()
    # A common factor cancels; dividing by the largest weight keeps the exponentials from overflowing.
    weight_T = torch.exp(log_ratio_T - log_ratio_T.amax())
    share = weight_T.sum().square() / (weight_T.square().sum() * weight_T.numel())
    return min(float(share), 1.0)
