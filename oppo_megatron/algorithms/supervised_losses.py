"""Losses of supervised training: next tokens (SFT), preferences and steps (reward models).

R: tokens and P: pairs of a micro-batch.  `num_tokens` and `num_pairs` count the whole batch.  Statistics are sums over `count`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from oppo_megatron.algorithms.packed import count, right_share, rounding, total


def next_token_loss(logp_R: Tensor, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean negative log-prob (nats) of the completion tokens."""
    return -logp_R.sum() / num_tokens, {"count": count(logp_R), "loss": total(-logp_R)}


def preference_loss(scores_P2: Tensor, num_pairs: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley-Terry: mean -log sigmoid(chosen - rejected); column 0 has the chosen answers."""
    _, losses_P, right_P, margin_P = preference_table(scores_P2).unbind(-1)
    return losses_P.sum() / num_pairs, {
        "count": count(margin_P),
        "loss": total(losses_P),
        "accuracy": total(right_P),
        "margin": total(margin_P),
    }


def preference_table(scores_P2: Tensor) -> Tensor:
    """Return 1, loss, accuracy and margin of each pair, [P, 4]."""
    chosen_P, rejected_P = scores_P2.unbind(-1)
    margin_P = chosen_P - rejected_P
    right_P = right_share(margin_P, rounding(scores_P2) * scores_P2.abs().amax(-1)).to(margin_P.dtype)
    return torch.stack([torch.ones_like(margin_P), -logsigmoid(margin_P), right_P, margin_P], -1)


def means(stats: Mapping[str, float]) -> dict[str, float]:
    """Divide sums by `count`; {} for {} (an early pipeline stage)."""
    return {name: value / stats["count"] for name, value in stats.items() if name != "count"}


def step_loss(logits_R: Tensor, labels_R: Tensor, num_labels: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean binary cross-entropy (nats) of labels from 0 to 1."""
    _, losses_R, right_R = step_table(logits_R, labels_R).unbind(-1)
    return losses_R.sum() / num_labels, {"count": count(losses_R), "loss": total(losses_R), "accuracy": total(right_R)}


def step_table(logits_R: Tensor, labels_R: Tensor) -> Tensor:
    """Return 1, loss and accuracy of each label, [R, 3]."""
    noise = torch.full_like(logits_R, rounding(logits_R))  # of a logit of usual size, 1
    logits_R = logits_R.to(torch.promote_types(logits_R.dtype, torch.float32))
    losses_R = binary_cross_entropy_with_logits(logits_R, labels_R.to(logits_R.dtype), reduction="none")
    right_R = right_share(torch.where(labels_R > 0.5, logits_R, -logits_R), noise).to(logits_R.dtype)
    return torch.stack([torch.ones_like(losses_R), losses_R, right_R], -1)


def step_scores(logits_S: Tensor) -> Tensor:
    return logits_S.double().sigmoid()


def response_scores(
    scores_S: Tensor, counts: Sequence[int], how: Literal["last", "min", "sum", "potential"]
) -> tuple[Tensor, Tensor | None]:
    """Scores [B] of steps' scores (`counts` per response), and steps' shares [S] (None: no step rewards)."""
    rows = scores_S.split(list(counts))
    if how == "min":
        return torch.stack([row.amin() for row in rows]), None
    if how == "sum":
        return torch.stack([row.sum() for row in rows]), scores_S
    last_B = torch.stack([row[-1] for row in rows])
    return last_B, None if how == "last" else torch.cat([row.diff(prepend=row.new_zeros(1)) for row in rows])
