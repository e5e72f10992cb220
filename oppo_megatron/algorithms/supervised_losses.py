"""Losses of supervised training: next tokens (SFT) and preferences (reward model).

Legend: R completion tokens of a micro-batch, P pairs of a micro-batch.  `num_tokens` and `num_pairs` count the whole
batch, so that the losses (and gradients) of micro-batches add up to the batch's mean.  Statistics are sums over a
micro-batch's own tokens or pairs, `count` of them; they add up too, and `means` makes the batch's means of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from oppo_megatron.algorithms.stats import count, right_share, rounding, total


def next_token_loss(logp_R: Tensor, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean negative log-prob (nats) of the completion tokens.  Statistic: `loss`."""
    return -logp_R.sum() / num_tokens, {"count": count(logp_R), "loss": total(-logp_R)}


def preference_loss(scores_P2: Tensor, num_pairs: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley-Terry: mean -log sigmoid(chosen - rejected); column 0 scores the chosen answers.

    Statistics: `loss`, `accuracy` (whether the chosen answer scores higher; a tie, up to rounding, counts half), `margin`
    (chosen - rejected).
    """
    _, losses_P, right_P, margin_P = preference_table(scores_P2).unbind(-1)
    return losses_P.sum() / num_pairs, {
        "count": count(margin_P),
        "loss": total(losses_P),
        "accuracy": total(right_P),
        "margin": total(margin_P),
    }


def preference_table(scores_P2: Tensor) -> Tensor:
    """For each pair: 1, its loss, whether the chosen answer scores higher, and by how much [P, 4]."""
    chosen_P, rejected_P = scores_P2.unbind(-1)
    margin_P = chosen_P - rejected_P
    right_P = right_share(margin_P, rounding(scores_P2) * scores_P2.abs().amax(-1)).to(margin_P.dtype)
    return torch.stack([torch.ones_like(margin_P), -logsigmoid(margin_P), right_P, margin_P], -1)


def means(stats: Mapping[str, float]) -> dict[str, float]:
    """Every summed statistic divided by `count`, which is left out.  No statistics (an early stage) have no means."""
    return {name: value / stats["count"] for name, value in stats.items() if name != "count"}
