"""Process rewards: the loss of a model that judges steps, and what its scores come to as rewards.

Legend: R labelled steps of a micro-batch; B responses, S steps of all of them (packed).  `num_labels` counts the labels of
the whole batch, so that the losses (and gradients) of micro-batches add up to the batch's mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from oppo_megatron.algorithms.stats import count, right_share, rounding, total


def step_loss(logits_R: Tensor, labels_R: Tensor, num_labels: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean binary cross-entropy (nats) of the labels, from 0 to 1, where sigmoid(logit) is the probability of 1.

    It is the cross-entropy of two classes whose logits differ by `logits_R`.  Statistics: `loss`, `accuracy` (whether the
    likelier class is that of the label; 1/2 if the classes are equally likely, up to rounding).
    """
    _, losses_R, right_R = step_table(logits_R, labels_R).unbind(-1)
    return losses_R.sum() / num_labels, {"count": count(losses_R), "loss": total(losses_R), "accuracy": total(right_R)}


def step_table(logits_R: Tensor, labels_R: Tensor) -> Tensor:
    """For each label: 1, its loss, whether the likelier class is that of the label [R, 3]."""
    noise = torch.full_like(logits_R, rounding(logits_R))  # of a logit of usual size, 1
    logits_R = logits_R.to(torch.promote_types(logits_R.dtype, torch.float32))
    losses_R = binary_cross_entropy_with_logits(logits_R, labels_R.to(logits_R.dtype), reduction="none")
    right_R = right_share(torch.where(labels_R > 0.5, logits_R, -logits_R), noise).to(logits_R.dtype)
    return torch.stack([torch.ones_like(losses_R), losses_R, right_R], -1)


def step_scores(logits_S: Tensor) -> Tensor:
    """The probability that a step is right, in double precision."""
    return logits_S.double().sigmoid()


def response_scores(
    scores_S: Tensor, counts: Sequence[int], how: Literal["last", "min", "sum", "potential"]
) -> tuple[Tensor, Tensor | None]:
    """The score of each response [B], from those of its steps (`counts` of each), and what each step adds to it [S].

    The latter add up to the former; None where only the whole response is rewarded.
    """
    rows = scores_S.split(list(counts))
    if how == "min":
        return torch.stack([row.amin() for row in rows]), None
    if how == "sum":
        return torch.stack([row.sum() for row in rows]), scores_S
    last_B = torch.stack([row[-1] for row in rows])
    return last_B, None if how == "last" else torch.cat([row.diff(prepend=row.new_zeros(1)) for row in rows])
