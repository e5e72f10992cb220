"""The weight of each response's tokens in the loss of a minibatch.

Legend: N responses of a minibatch in G groups, side by side; T their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from oppo_megatron.config.algorithm import Reduction


def row_weights(
    lengths_N: Sequence[int],
    group_size: int,
    reduction: Reduction,
    longest: int,
    counted_N: Sequence[bool] | None = None,
) -> list[float]:
    """Weights of the tokens of each response [N], in units of 1/T: all are 1 with `token_mean`.

    A loss is the sum of its tokens' terms times these, divided by T.  They come from the whole minibatch once, so the losses
    of micro-batches and replicas add up to the minibatch's whatever the reduction.  `longest`: L_max of `constant`, the
    limit of a response (arXiv 2503.20783).

    token_mean        1/T                     sequence_mean     1/(N |o|)          constant     1/(N L_max)
    group_token_mean  1/(G tokens of group)   sequence_sum      1/N

    `counted_N`: rows that are left out weigh 0.  Their tokens are then missing from T and from their group's, but they are still
    of the N rows and G groups, as with TRL's `mask_truncated_completions` (1.12.0, `GRPOTrainer._compute_loss`): its masks are
    what it sums tokens by, while it takes means over all rows.
    """
    if counted_N is not None and not all(counted_N):
        return _of_counted(lengths_N, group_size, reduction, longest, counted_N)
    num_tokens, num_rows = sum(lengths_N), len(lengths_N)
    if reduction == "token_mean":
        return [1.0] * num_rows
    if reduction == "sequence_mean":
        return [num_tokens / (num_rows * length) for length in lengths_N]
    if reduction == "constant":
        return [num_tokens / (num_rows * longest)] * num_rows
    if reduction == "sequence_sum":
        return [num_tokens / num_rows] * num_rows
    of_group = [sum(lengths_N[first : first + group_size]) for first in range(0, num_rows, group_size)]
    return [num_tokens / (len(of_group) * of_group[row // group_size]) for row in range(num_rows)]


def _of_counted(
    lengths_N: Sequence[int], group_size: int, reduction: Reduction, longest: int, counted_N: Sequence[bool]
) -> list[float]:
    """The weights where not all rows count; 0 for all, if none does."""
    weights = row_weights(lengths_N, group_size, reduction, longest)
    left = [length * counted for length, counted in zip(lengths_N, counted_N, strict=True)]
    if reduction == "token_mean":
        grown = [sum(lengths_N) / max(1, sum(left))] * len(left)
    elif reduction == "group_token_mean":
        starts = range(0, len(left), group_size)
        of_group = [(sum(lengths_N[at : at + group_size]), sum(left[at : at + group_size])) for at in starts]
        grown = [before / max(1, after) for before, after in of_group for _ in range(group_size)]
    else:
        grown = [1.0] * len(left)
    return [weight * factor * counted for weight, factor, counted in zip(weights, grown, counted_N, strict=True)]
