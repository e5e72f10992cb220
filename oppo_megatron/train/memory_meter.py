"""Measured memory of each rank, compared with the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from oppo_megatron.cluster.held_memory import device_bytes, held_bytes, peak_bytes
from oppo_megatron.cluster.world import World
from oppo_megatron.config.model import format_ranks
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.errors import CapacityError
from oppo_megatron.layout.memory import shortage
from oppo_megatron.layout.role_memory import lasting_memory
from oppo_megatron.train.score_exchange import by_rank

MEBIBYTE = 2**20
FIXED_MEBIBYTES = 100
"""Upper bound for libraries' threads, kernels and allocator pools, regardless of model size."""


def require_memory(config: TrainConfig | SupervisedConfig, world: World) -> None:
    """Raise CapacityError if host or CUDA device lacks the least memory of the run."""
    me = world.hosts[world.rank]
    mine = (me.node, me.host, me.device)  # containers of several machines may bear one name
    ranks = [each.rank for each in world.hosts if (each.node, each.host, each.device) == mine]
    lasting = lasting_memory(config, on_cpu=world.device.type == "cpu")
    where = me.host if world.device.type == "cpu" else f"{me.device} of {me.host}"
    problem = shortage([lasting[rank] for rank in ranks], device_bytes(world.device), f"rank {format_ranks(ranks)}", where)
    if problem:
        raise CapacityError(problem)


@dataclass
class MemoryMeter:
    """This rank's memory: `base_bytes` before any model, and the peak."""

    device: torch.device
    base_bytes: int
    peak_bytes: int
    by_rank: MemoryByRank = field(default_factory=lambda: MemoryByRank([], []))

    @classmethod
    def begin(cls, device: torch.device) -> MemoryMeter:
        """Call after libraries, process groups and inputs are loaded."""
        base = held_bytes(device)
        return cls(device, base, base)

    def look(self) -> None:
        """Record the peak; the kernel's counts may decrease."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes(self.device))

    def of_all_ranks(self) -> MemoryByRank:
        """Share the recorded peaks.  Collective of the world."""
        self.by_rank = MemoryByRank(*by_rank([self.base_bytes, self.peak_bytes], self.device))
        return self.by_rank


@dataclass(frozen=True)
class MemoryByRank:
    base: Sequence[float]
    peak: Sequence[float]

    def peak_fields(self) -> dict[str, Any]:
        return {"memory_peak_mb": _mebibytes(self.peak)}

    def summary(self, planned: Sequence[float]) -> dict[str, Any]:
        sizes = {"memory_base_mb": self.base, "memory_peak_mb": self.peak, "memory_planned_mb": planned}
        ratios = [round(ratio, 3) for ratio in self.ratios(planned)]
        return {name: _mebibytes(each) for name, each in sizes.items()} | {"memory_ratio": ratios}

    def ratios(self, planned: Sequence[float]) -> list[float]:
        return [(peak - base) / plan for base, peak, plan in zip(self.base, self.peak, planned, strict=True)]

    def describe(self, planned: Sequence[float]) -> str:
        """Name the rank that is furthest beyond its plan and what libraries hold, or else beyond its plan."""
        ratios, fixed = self.ratios(planned), FIXED_MEBIBYTES * MEBIBYTE
        rank = max(range(len(ratios)), key=lambda rank: (max(1.0, ratios[rank] - fixed / planned[rank]), ratios[rank]))
        used, plan = (round(size / MEBIBYTE) for size in (self.peak[rank] - self.base[rank], planned[rank]))
        if plan < used <= plan + FIXED_MEBIBYTES:
            return (
                f"memory: {used} MiB above base on rank {rank}, {used - plan} more than the plan's {plan}: no more than what "
                f"libraries hold for any model (up to {FIXED_MEBIBYTES} MiB), which the plan does not count"
            )
        return f"memory: at most {ratios[rank]:.2f} of the plan (rank {rank}: {used} of {plan} MiB, peak above base)"


def _mebibytes(sizes: Sequence[float]) -> list[float]:
    return [round(size / MEBIBYTE, 2) for size in sizes]
