"""Process groups with the run's deadline."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


def new_group(ranks: Sequence[int], desc: str, backend: str | None = None) -> dist.ProcessGroup:
    """`dist.new_group` with the timeout of the default group (`runtime.timeout_s`), and its back ends if no other is named.

    torch itself gives a new group 30 minutes (10 on NCCL), whatever the default group has.  A call of all ranks of the
    world, like torch's.
    """
    return dist.new_group(list(ranks), timeout=world_timeout(), backend=backend, group_desc=desc)


def open_connections(group: dist.ProcessGroup, device: torch.device) -> None:
    """Before batched messages between some ranks of a group.  Every rank of the group makes the call.

    NCCL connects all ranks of a group in its first call of that group, and waits there for those that do not make it.
    """
    if device.type == "cuda" and group.size() > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def world_timeout() -> timedelta:
    """How long the world's default group waits (`runtime.timeout_s`)."""
    world = dist.group.WORLD
    assert world is not None, "the world is open before its groups are made"
    timeout: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    return timeout
