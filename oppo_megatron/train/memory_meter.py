"""Measured memory of each rank, compared with the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from oppo_megatron.cluster.held_memory import device_bytes, held_bytes, peak_bytes
from oppo_megatron.cluster.hosts import format_ranks
from oppo_megatron.cluster.world import World
from oppo_megatron.config.run import SupervisedConfig, TrainConfig
from oppo_megatron.errors import CapacityError
from oppo_megatron.layout.holdings import lasting_memory
from oppo_megatron.layout.memory import shortage
from oppo_megatron.mcore.out_of_memory import MemoryLimits
from oppo_megatron.train.score_exchange import by_rank

MEBIBYTE = 2**20
FIXED_MEBIBYTES = 100
"""At most what libraries take once the first model computes, whatever its size: threads, kernels, allocators' pools."""


def require_memory(config: TrainConfig | SupervisedConfig, world: World) -> None:
    """Raises CapacityError where this rank's host, or its CUDA device, has less memory than is held there for certain."""
    me = world.hosts[world.rank]
    mine = (me.node, me.host, me.device)  # containers of several machines may bear one name
    ranks = [each.rank for each in world.hosts if (each.node, each.host, each.device) == mine]
    lasting = lasting_memory(config, on_cpu=world.device.type == "cpu")
    where = me.host if world.device.type == "cpu" else f"{me.device} of {me.host}"
    problem = shortage(
        [lasting[rank] for rank in ranks], device_bytes(world.device), f"rank {format_ranks(ranks)}", where
    )
    if problem:
        raise CapacityError(problem)


@dataclass
class MemoryMeter:
    """This rank's memory: `base_bytes` held before any model was built, and the most up to the last `look`.

    `memory_limits` bound this rank's work at once, after memory has run out; `by_rank`: the last report of all ranks.
    """

    device: torch.device
    base_bytes: int
    peak_bytes: int
    memory_limits: MemoryLimits = field(default_factory=MemoryLimits)
    by_rank: MemoryByRank = field(default_factory=lambda: MemoryByRank([], []))

    @classmethod
    def begin(cls, device: torch.device) -> MemoryMeter:
        """Call this once libraries, process groups and inputs are there, before any model is built."""
        base = held_bytes(device)
        return cls(device, base, base)

    def look(self) -> None:
        """Take note of the peak up to now; the kernel's own counts are a little off, and may go down."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes(self.device))

    def of_all_ranks(self) -> MemoryByRank:
        """Collective of the world."""
        values = [self.base_bytes, self.peak_bytes, *self.memory_limits.vector()]
        base, peak, train, score, decode, halved = by_rank(values, self.device)
        self.by_rank = MemoryByRank(base, peak, train, score, decode, int(sum(halved)))
        return self.by_rank


@dataclass(frozen=True)
class MemoryByRank:
    """Base and peak of every rank, in bytes, in the order of ranks, and what each has memory for at once.

    `train` and `score` are tokens of a micro-batch, `decode` sequences of one; 0: no bound has been met.  `halved`: how often
    one was, on all ranks.
    """

    base: Sequence[float]
    peak: Sequence[float]
    train: Sequence[float] = ()
    score: Sequence[float] = ()
    decode: Sequence[float] = ()
    halved: int = 0

    @property
    def decode_most(self) -> int | None:
        """Sequences of a decode micro-batch that every rank has memory for; None: no rank has met a bound."""
        return _smallest(self.decode)

    def bounds(self) -> dict[str, Any]:
        """What a step's line and `summary.json` say of memory that ran out: the smallest bounds of all ranks."""
        return {
            "memory_halved": self.halved,
            "memory_train_tokens": _smallest(self.train),
            "memory_prefill_tokens": _smallest(self.score),
            "memory_decode_sequences": self.decode_most,
        }

    def state_dict(self) -> list[list[int]]:
        """The limits of training, prefill and decoding by rank, in plain JSON types."""
        return [[int(each) for each in rank] for rank in zip(self.train, self.score, self.decode, strict=True)]

    def peak_fields(self) -> dict[str, Any]:
        """What a step's line says."""
        return {"memory_peak_mb": _mebibytes(self.peak)}

    def summary(self, planned: Sequence[float]) -> dict[str, Any]:
        """The figures for `summary.json`; `planned`: bytes from `rank_memory`."""
        return {
            "memory_base_mb": _mebibytes(self.base),
            "memory_peak_mb": _mebibytes(self.peak),
            "memory_planned_mb": _mebibytes(planned),
            "memory_ratio": [round(ratio, 3) for ratio in self.ratios(planned)],
        } | self.bounds()

    def ratios(self, planned: Sequence[float]) -> list[float]:
        """(peak - base) / planned of each rank."""
        return [(peak - base) / plan for base, peak, plan in zip(self.base, self.peak, planned, strict=True)]

    def describe(self, planned: Sequence[float]) -> str:
        """A line about the rank that went furthest beyond its plan."""
        ratios = self.ratios(planned)
        rank = max(range(len(ratios)), key=ratios.__getitem__)
        used, plan = (round(size / MEBIBYTE) for size in (self.peak[rank] - self.base[rank], planned[rank]))
        if plan < used < FIXED_MEBIBYTES:
            return (
                f"memory: {used} MiB above base on rank {rank}, where the plan has {plan}: in runs this small most of it is what "
                f"libraries hold for any model (up to {FIXED_MEBIBYTES} MiB), which the plan does not count"
            )
        return f"memory: at most {ratios[rank]:.2f} of the plan (rank {rank}: {used} of {plan} MiB, peak above base)"


def _smallest(bounds: Sequence[float]) -> int | None:
    return min((int(bound) for bound in bounds if bound), default=None)


def _mebibytes(sizes: Sequence[float]) -> list[float]:
    return [round(size / MEBIBYTE, 2) for size in sizes]
