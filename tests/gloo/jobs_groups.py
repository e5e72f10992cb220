"""Counts the connections that groups of gloo make."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from oppo_megatron.cluster.process_groups import connect_pairs, new_group


def connections(sizes: list[int]) -> list[tuple[int, int, int]]:
    """Files of this rank for a group of so many ranks: made, connected, added by collectives; zeros on other ranks."""
    return [_connections(size) for size in sizes]


def _connections(size: int) -> tuple[int, int, int]:
    held = [_files()]
    group = new_group(range(size), "some")
    held.append(_files())
    belongs = dist.get_rank() < size
    if belongs:
        connect_pairs(group)
    held.append(_files())
    if belongs:
        _use(group, size)
    held.append(_files())
    before, made, connected, used = held
    return (made - before, connected - made, used - connected)


def _use(group: dist.ProcessGroup, size: int) -> None:
    one = torch.zeros(1)
    dist.all_reduce(one, group=group)
    dist.all_reduce(torch.zeros(1 << 18), op=dist.ReduceOp.MAX, group=group)
    for source in range(size):
        dist.broadcast(one, source, group=group)
    dist.broadcast_object_list([1], src=size - 1, group=group)
    dist.all_gather([torch.zeros(1) for _ in range(size)], one, group=group)
    dist.all_gather_object([None] * size, 1, group=group)
    dist.all_gather_single(torch.zeros(size), one, group=group)
    dist.reduce_scatter_single(one, torch.zeros(size), group=group)
    dist.barrier(group)


def _files() -> int:
    """Files of this process when all ranks are here: a connection that another rank made is a file of this one, too."""
    dist.barrier()
    time.sleep(0.1)
    found = len(os.listdir("/proc/self/fd"))
    dist.barrier()
    return found
