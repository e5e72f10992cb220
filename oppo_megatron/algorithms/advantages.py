"""Rewards per token, generalised advantage estimation and whitening.

Legend: T all response tokens of the batch (packed, see `packing`), B rows (responses).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oppo_megatron.algorithms.packed import Lengths, last_tokens, lengths_like, tokens_after

WHITEN_EPS = 1e-8
"""Added to a variance, so that what does not vary can be divided by its deviation."""


def clip_scores(scores_B: Tensor, bound: float | None) -> Tensor:
    """Scores held to [-bound, bound]; None leaves them as they are."""
    return scores_B if bound is None else scores_B.clamp(-bound, bound)


def token_rewards(scores_B: Tensor, kl_T: Tensor, lengths_B: Lengths, kl_coefficient: float) -> Tensor:
    """Reward of each token, [T]: minus coefficient times its KL, and the response's score on its last token."""
    last_B = last_tokens(lengths_like(kl_T, lengths_B))
    rewards_T = -kl_coefficient * kl_T
    rewards_T[last_B] += scores_B
    return rewards_T


def gae(
    rewards_T: Tensor, values_T: Tensor, lengths_B: Lengths, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [T] (paper eq. 1; Schulman et al. 2016).

    delta_t = r_t + gamma V_{t+1} - V_t, with V = 0 after a row's last token, and A_t = sum_l (gamma lambda)^l
    delta_{t+l}.  The sum is built by doubling: once A_t holds the first n terms, adding (gamma lambda)^n A_{t+n}
    makes it hold 2n.  That takes log2(longest row) vectorised steps on the packed tokens, and a row's result does not
    depend on its neighbours.
    """
    after_T = tokens_after(lengths_like(rewards_T, lengths_B))
    next_values_T = values_T.roll(-1).masked_fill(after_T == 0, 0.0)
    advantages_T = rewards_T + gamma * next_values_T - values_T
    num_terms, longest = 1, int(after_T.max()) + 1
    while num_terms < longest:
        later = advantages_T[num_terms:].masked_fill(after_T[:-num_terms] < num_terms, 0.0)
        advantages_T = torch.cat(
            [advantages_T[:-num_terms] + (gamma * gae_lambda) ** num_terms * later, advantages_T[-num_terms:]]
        )
        num_terms *= 2
    return advantages_T, advantages_T + values_T


def whiten(x_T: Tensor) -> Tensor:
    """`x_T` shifted to mean 0 and scaled to population variance 1, [T].  The moments are taken in double precision."""
    exact_T = x_T.detach().double()
    mean = float(exact_T.sum()) / x_T.numel()
    variance = max(float(exact_T.square().sum()) / x_T.numel() - mean**2, 0.0)  # rounding must not make it negative
    return (x_T - mean) / math.sqrt(variance + WHITEN_EPS)
