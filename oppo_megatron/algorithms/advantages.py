"""Token rewards, baselines, GAE, whitening.  T: packed response tokens, B: responses in G groups of N neighbours (one prompt)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_megatron.algorithms.packed import Lengths, last_tokens, lengths_like, row_sums, tokens_after
from oppo_megatron.config.algorithm import Baseline, Scale
from oppo_megatron.records import TIE

WHITEN_EPS = 1e-8
"""Added to a variance before dividing by its square root."""
DEVIATION_EPS = 1e-4
"""Added to a standard deviation before dividing by it (TRL's value; verl adds 1e-6)."""


def token_rewards(
    scores_B: Tensor, kl_T: Tensor, lengths_B: Lengths, kl_coefficient: float, step_rewards_T: Tensor | None = None
) -> Tensor:
    """Return -coefficient * KL + `step_rewards_T` + the rest of the score at the last token, [T]."""
    lengths_B = lengths_like(kl_T, lengths_B)
    rewards_T = -kl_coefficient * kl_T
    if step_rewards_T is not None:
        rewards_T = rewards_T + step_rewards_T
        scores_B = scores_B - row_sums(step_rewards_T, lengths_B)
    rewards_T[last_tokens(lengths_B)] += scores_B
    return rewards_T


def compared(scores_B: Tensor, group_size: int, baseline: Baseline, scale: Scale, greedy_G: Tensor | None = None) -> Tensor:
    """Return (scores - baseline) / scale, [B], computed in float64; 0 in `equal_groups`."""
    scores_GN = scores_B.double().view(-1, group_size)
    centred_GN = _centred(scores_GN, baseline, None if greedy_G is None else greedy_G.double())
    if scale == "group_std":
        centred_GN = centred_GN / (_deviation(scores_GN, 1) + DEVIATION_EPS)
    elif scale == "batch_std":
        centred_GN = centred_GN / (_deviation(scores_GN.flatten(), 0) + DEVIATION_EPS)
    elif scale == "advantage_std":
        centred_GN = (centred_GN - centred_GN.mean()) / (_deviation(centred_GN.flatten(), 0) + DEVIATION_EPS)
    return centred_GN.flatten().to(scores_B.dtype)


def equal_groups(scores_B: Tensor, group_size: int, greedy_G: Tensor | None = None) -> Tensor:
    """True for groups whose scores, the greedy one included, are equal up to `TIE`, [G]."""
    scores_GN = scores_B.view(-1, group_size)
    if greedy_G is not None:
        scores_GN = torch.cat([scores_GN, greedy_G[:, None]], 1)
    spread_G = scores_GN.amax(1) - scores_GN.amin(1)
    return (spread_G <= TIE * scores_GN.abs().amax(1)) & spread_G.isfinite()


def _centred(scores_GN: Tensor, baseline: Baseline, greedy_G: Tensor | None) -> Tensor:
    if baseline in ("critic", "none"):
        return scores_GN
    if baseline == "best_worst":
        return _best_worst(scores_GN)
    if baseline == "greedy":
        assert greedy_G is not None, "baseline greedy needs the scores of greedy responses"
        return scores_GN - greedy_G[:, None]
    size = scores_GN.shape[1]
    centred_GN = scores_GN - scores_GN.mean(1, keepdim=True)
    if baseline == "others":
        centred_GN = centred_GN * size / max(size - 1, 1)
    return centred_GN.masked_fill(equal_groups(scores_GN.flatten(), size)[:, None], 0.0)


def _best_worst(scores_GN: Tensor) -> Tensor:
    """1 for a group's best, -1 for its worst (the first of equals), else 0; all NaN with a NaN."""
    signs_GN = torch.zeros_like(scores_GN)
    tie_G1 = TIE / 2 * scores_GN.abs().amax(1, keepdim=True)
    for sign in (1.0, -1.0):
        close_GN = sign * scores_GN >= (sign * scores_GN).amax(1, keepdim=True) - tie_G1
        signs_GN.scatter_(1, close_GN.byte().argmax(1, keepdim=True), sign)
    signs_GN = signs_GN.masked_fill(equal_groups(scores_GN.flatten(), scores_GN.shape[1])[:, None], 0.0)
    return signs_GN.masked_fill(scores_GN.isnan().any(1, keepdim=True), torch.nan)


def _deviation(x: Tensor, dim: int) -> Tensor:
    return x.std(dim, keepdim=True) if x.shape[dim] > 1 else torch.zeros_like(x)


def gae(rewards_T: Tensor, values_T: Tensor, lengths_B: Lengths, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [T] (paper eq. 1; Schulman et al. 2016), with V = 0 after a row's end."""
    after_T = tokens_after(lengths_like(rewards_T, lengths_B))
    next_values_T = values_T.roll(-1).masked_fill(after_T == 0, 0.0)
    advantages_T = rewards_T + gamma * next_values_T - values_T
    num_terms, longest = 1, int(after_T.max()) + 1
    while num_terms < longest:
        later = advantages_T[num_terms:].masked_fill(after_T[:-num_terms] < num_terms, 0.0)
        grown = advantages_T[:-num_terms] + (gamma * gae_lambda) ** num_terms * later
        advantages_T = torch.cat([grown, advantages_T[-num_terms:]])
        num_terms *= 2
    return advantages_T, advantages_T + values_T


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares, in float64; moments of disjoint parts can be added."""

    count: int
    total: float
    total_of_squares: float

    @classmethod
    def of(cls, x_T: Tensor) -> Moments:
        exact_T = x_T.detach().double()
        return cls(x_T.numel(), float(exact_T.sum()), float(exact_T.square().sum()))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.total_of_squares + other.total_of_squares)

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Population variance."""
        return max(self.total_of_squares / self.count - self.mean**2, 0.0)


NOTHING_SEEN = Moments(0, 0.0, 0.0)


def whiten(x_T: Tensor, moments: Moments | None = None) -> Tensor:
    """Scale to mean 0 and variance 1 by `moments` (default: its own)."""
    moments = moments or Moments.of(x_T)
    return (x_T - moments.mean) / math.sqrt(moments.variance + WHITEN_EPS)
