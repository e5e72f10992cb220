"""The projection with a bias (queries, keys and values of Qwen2), rounded once.

megatron-core adds the bias to a product that has been rounded already.  In bfloat16 that is a second rounding, which neither
Hugging Face's forward nor cached decoding makes: log-probs of decoding and of training would drift apart by it.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor


class BiasedLinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` whose bias is part of the product; without a bias it is megatron's own."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bias, group = kwargs["bias"], kwargs["tp_group"]
        if bias is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        if kwargs["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=group)
        elif kwargs["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=group)
        return F.linear(input, weight, bias)
