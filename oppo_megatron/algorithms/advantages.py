"""Rewards per token, generalised advantage estimation and whitening.

Legend: T all response tokens of the batch (packed, see `packing`), B rows (responses).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_megatron.algorithms.packed import Lengths, last_tokens, lengths_like, row_sums, tokens_after

WHITEN_EPS = 1e-8
"""Added to a variance, so that equal numbers can be divided by their deviation."""


def clip_scores(scores_B: Tensor, bound: float | None) -> Tensor:
    """Clamp scores to [-bound, bound]; None leaves them unchanged."""
    return scores_B if bound is None else scores_B.clamp(-bound, bound)


def token_rewards(
    scores_B: Tensor, kl_T: Tensor, lengths_B: Lengths, kl_coefficient: float, step_rewards_T: Tensor | None = None
) -> Tensor:
    """Return the reward of each token, [T]: minus coefficient times its KL, and the response's score on its last token.

    `step_rewards_T`: parts of the score that single tokens have earned; the last token gets the rest of the score.
    """
    lengths_B = lengths_like(kl_T, lengths_B)
    rewards_T = -kl_coefficient * kl_T
    if step_rewards_T is not None:
        rewards_T = rewards_T + step_rewards_T
        scores_B = scores_B - row_sums(step_rewards_T, lengths_B)
    rewards_T[last_tokens(lengths_B)] += scores_B
    return rewards_T


def gae(
    rewards_T: Tensor, values_T: Tensor, lengths_B: Lengths, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both [T] (paper eq. 1; Schulman et al. 2016).

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


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of a quantity, in double precision; moments of disjoint parts add up."""

    count: int
    total: float
    total_of_squares: float

    @classmethod
    def of(cls, x_T: Tensor) -> Moments:
        exact_T = x_T.detach().double()
        return cls(x_T.numel(), float(exact_T.sum()), float(exact_T.square().sum()))

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count, self.total + other.total, self.total_of_squares + other.total_of_squares
        )

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Population variance; rounding never makes it negative."""
        return max(self.total_of_squares / self.count - self.mean**2, 0.0)


NOTHING_SEEN = Moments(0, 0.0, 0.0)


def whiten(x_T: Tensor, moments: Moments | None = None) -> Tensor:
    """Return `x_T` shifted to mean 0 and scaled to population variance 1, [T].

    `moments`: the moments of a larger set that contains `x_T`; None takes the moments of `x_T`.
    """
    moments = moments or Moments.of(x_T)
    return (x_T - moments.mean) / math.sqrt(moments.variance + WHITEN_EPS)
