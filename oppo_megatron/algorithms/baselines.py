"""Baselines and scales of scores, from the scores of other responses.

Legend: B responses of the batch, G groups of n each, side by side; a group is the responses to one prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oppo_megatron.config.algorithm import Baseline, Scale
from oppo_megatron.records import TIE

DEVIATION_EPS = 1e-4
"""Added to a deviation that divides (TRL's; verl adds 1e-6)."""


def compared(
    scores_B: Tensor,
    group_size: int,
    baseline: Baseline,
    scale: Scale,
    greedy_G: Tensor | None = None,
    *,
    eps: float = DEVIATION_EPS,
) -> Tensor:
    """Return scores minus their baseline, divided by their scale, [B]; computed in double precision.

    `greedy_G`: the score of the greedy response to each prompt, for the baseline `greedy`.  It depends on the prompt and the
    weights only, not on the response that is compared with it, so it does not change the expected gradient.

    A group of equal scores (`equal_groups`) gets exact zeros: rounding can make its deviation a tiny number, by which `eps`
    would not bound the quotient.  Deviations divide by n - 1.  A critic's values and whitening are applied per token, elsewhere.
    """
    scores_GN = scores_B.double().view(-1, group_size)
    centred_GN = _centred(scores_GN, baseline, None if greedy_G is None else greedy_G.double())
    if scale == "group_std":
        centred_GN = centred_GN / (_deviation(scores_GN, 1) + eps)
    elif scale == "batch_std":
        centred_GN = centred_GN / (_deviation(scores_GN.flatten(), 0) + eps)
    elif scale == "advantage_std":
        centred_GN = (centred_GN - centred_GN.mean()) / (_deviation(centred_GN.flatten(), 0) + eps)
    return centred_GN.flatten().to(scores_B.dtype)


def equal_groups(scores_B: Tensor, group_size: int, greedy_G: Tensor | None = None) -> Tensor:
    """Return True for each group whose scores, the greedy response's included, are equal up to `TIE` (bool, [G])."""
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
    """Return 1 for the best response of each group, -1 for the worst (the first of equal ones), 0 for others and in groups of
    equal scores.  Scores within half of `TIE` are equal, so no response of an unequal group is both best and worst.

    A group with a NaN gets NaN.
    """
    signs_GN = torch.zeros_like(scores_GN)
    tie_G1 = TIE / 2 * scores_GN.abs().amax(1, keepdim=True)
    for sign in (1.0, -1.0):
        close_GN = sign * scores_GN >= (sign * scores_GN).amax(1, keepdim=True) - tie_G1
        signs_GN.scatter_(1, close_GN.byte().argmax(1, keepdim=True), sign)
    signs_GN = signs_GN.masked_fill(equal_groups(scores_GN.flatten(), scores_GN.shape[1])[:, None], 0.0)
    return signs_GN.masked_fill(scores_GN.isnan().any(1, keepdim=True), torch.nan)


def _deviation(x: Tensor, dim: int) -> Tensor:
    """Return the sample deviation along a dimension, which is kept; 0 for one number."""
    return x.std(dim, keepdim=True) if x.shape[dim] > 1 else torch.zeros_like(x)
