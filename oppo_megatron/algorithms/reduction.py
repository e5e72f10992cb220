"""The weight of each response's tokens in the loss of a minibatch.

Legend: N responses of a minibatch in G groups, side by side; T their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from oppo_megatron.config.algorithm import Reduction


def row_weights(lengths_N: Sequence[int], group_size: int, reduction: Reduction, longest: int) -> list[float]:
    """Weights of the tokens of each response [N], in units of 1/T: all are 1 with `token_mean`.

    A loss is the sum of its tokens' terms times these, divided by T.  They come from the whole minibatch once, so the losses
    of micro-batches and replicas add up to the minibatch's whatever the reduction.  `longest`: L_max of `constant`, the
    limit of a response (arXiv 2503.20783).

    token_mean        1/T                     sequence_mean     1/(N |o|)          constant     1/(N L_max)
    group_token_mean  1/(G tokens of group)   sequence_sum      1/N
    """
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
