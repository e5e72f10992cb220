"""Share one rank's error with all ranks, so that none waits for a rank that has left until the group's timeout."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from oppo_megatron.errors import OppoError

Known = TypeVar("Known")


def as_first(known: Known) -> Known:
    """Return the first rank's value on all ranks.  A collective call of all ranks."""
    told = [known]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def raise_together(error: Exception | None, kind: type[OppoError]) -> None:
    """Raise on all ranks if any rank has an `error`: its own, or a `kind` that names the rank.  A collective call."""
    failed = torch.tensor([error is not None], dtype=torch.int32, device=torch.cuda.current_device())
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not failed.item():
        return
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, None if error is None else str(error))
    if error is not None:
        raise error
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text is not None)
    raise kind(f"rank {rank}: {text}")
