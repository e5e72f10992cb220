"""Limits of memory: a process that may grow by so much and no more, and ranks that have met such a bound before."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from oppo_megatron.train.memory_meter import MemoryMeter

MIB = 2**20


@contextmanager
def room_for(mebibytes: int) -> Iterator[None]:
    """In the block, address space for so much beyond what the process has now."""
    gc.collect()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + mebibytes * MIB, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


@contextmanager
def begun_within(**most: int | None) -> Iterator[None]:
    """In the block, a run begins as if memory had run out before: with these bounds, by the names of limits."""
    begin = MemoryMeter.begin

    def bounded(device: torch.device) -> MemoryMeter:
        meter = begin(device)
        meter.memory_limits.bound({name: bound for name, bound in most.items() if bound is not None})
        return meter

    with mock.patch.object(MemoryMeter, "begin", bounded):
        yield
