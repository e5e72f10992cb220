"""Losses of supervised training: next tokens (SFT) and preferences (reward model).

Legend: R completion tokens of a micro-batch, P pairs of a micro-batch.  `num_tokens` and `num_pairs` count the whole
batch: what a micro-batch returns is its share of the batch's means, so shares add up over micro-batches.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def next_token_loss(logp_R: Tensor, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean negative log-prob (nats) of the completion tokens, and the same as statistic `loss`."""
    loss = -logp_R.sum() / num_tokens
    return loss, {"loss": loss.detach()}


def preference_loss(scores_P2: Tensor, num_pairs: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley-Terry: mean -log sigmoid(chosen - rejected); column 0 scores the chosen answers.

    Statistics: `loss`, `accuracy` (share of pairs whose chosen answer scores higher; a tie is a miss), and `margin`
    (mean of chosen - rejected).
    """
    margin_P = scores_P2[:, 0] - scores_P2[:, 1]
    loss = -logsigmoid(margin_P).sum() / num_pairs
    right_P = (margin_P > 0).double()
    return loss, {
        "loss": loss.detach(),
        "accuracy": right_P.sum() / num_pairs,
        "margin": margin_P.detach().sum() / num_pairs,
    }
