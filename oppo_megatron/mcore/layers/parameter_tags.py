"""What megatron reads off a parameter beside its numbers."""

from __future__ import annotations

from typing import Literal

import torch


def tag_parameter(
    parameter: torch.Tensor, name: Literal["sequence_parallel", "partition_stride"], value: bool | int
) -> None:
    """Set an attribute that megatron looks for and torch's types do not declare.

    `sequence_parallel`: the gradient is summed over tensor ranks, each of which has seen a part of the tokens.
    `partition_stride`: in how many pieces of its own a tensor-parallel shard was cut.
    """
    setattr(parameter, name, value)
