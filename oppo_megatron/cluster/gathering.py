"""What every rank of a group has, on all of them, as tensors: nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def gather_ragged(mine: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The vectors of all ranks of the group, in their order.  Two collectives: of lengths, then of the longest's length.

    `mine`: [any number], of one dtype on all ranks, on the CPU.
    """
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([mine.numel()]), group=group)
    sizes = [int(length) for length in lengths]
    longest = max(sizes)
    if not longest:
        return [mine.new_empty(0) for _ in sizes]
    padded = mine.new_zeros(longest)
    padded[: mine.numel()] = mine
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [vector[:size] for vector, size in zip(found, sizes, strict=True)]


def gather_figures(mine: Mapping[str, float], group: dist.ProcessGroup) -> list[dict[str, float]]:
    """The named numbers of all ranks of the group, to the bit; ranks may have different names.  As text: names are few."""
    text = torch.frombuffer(bytearray(json.dumps(dict(mine)).encode()), dtype=torch.uint8)
    return [json.loads(bytes(each.tolist())) for each in gather_ragged(text, group)]
