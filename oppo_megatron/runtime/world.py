"""This process's place among the ranks: device, threads, and the default process group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.errors import ConfigError


@dataclass(frozen=True)
class World:
    """Rank, number of ranks, and the device that this rank computes on."""

    rank: int
    size: int
    device: torch.device


def choose_device(config: RuntimeConfig) -> None:
    """Called first in a rank's process: with `runtime.device: cpu` its GPUs are hidden, from megatron-core too.

    megatron-core takes the current CUDA device wherever there is one, whatever the models' tensors are on.
    """
    if config.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def usable_cores() -> int:
    """Cores that this process may run on, which a container or a job may have fewer of than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device(config: RuntimeConfig, local_rank: int) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("runtime.device is 'cuda', but torch finds no CUDA device; set runtime.device=cpu or auto.")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


@contextlib.contextmanager
def open_world(config: RuntimeConfig, environment: Mapping[str, str] = os.environ) -> Iterator[World]:
    """Join the ranks named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without them be a world of one.

    gloo on CPU, NCCL on GPU (with gloo for CPU tensors).  A message or collective later than `runtime.timeout_s` is an error.
    """
    rank, size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    local_rank, local_size = int(environment.get("LOCAL_RANK", rank)), int(environment.get("LOCAL_WORLD_SIZE", size))
    device = _device(config, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(config.threads_per_rank or max(1, usable_cores() // local_size))
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=config.timeout_s)
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, init_method="env://", rank=rank, world_size=size, timeout=timeout)
    failed = True
    try:
        yield World(rank, size, device)
        failed = False
    finally:
        # A rank that failed must say so before its peers notice that it has gone, and leaving the group could wait for
        # messages that no one will take: where there are peers, the end of the process leaves it.
        if size == 1 or not failed:
            dist.destroy_process_group()
