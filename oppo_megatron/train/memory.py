"""What each rank's memory came to, beside what the plan counted for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oppo_megatron.runtime.held_memory import held_bytes, peak_bytes
from oppo_megatron.train.score_exchange import by_rank

MEBIBYTE = 2**20


@dataclass
class MemoryMeter:
    """This rank's memory: `base_bytes` held before any model was built, and the most up to the last `look`."""

    device: torch.device
    base_bytes: int
    peak_bytes: int

    @classmethod
    def begin(cls, device: torch.device) -> MemoryMeter:
        """To be called when libraries, process groups and inputs are there, and no model is."""
        base = held_bytes(device)
        return cls(device, base, base)

    def look(self) -> None:
        """Take note of the peak up to now; the kernel's own counts are a little off, and may go down."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes(self.device))

    def of_all_ranks(self) -> MemoryByRank:
        """Collective of the world."""
        return MemoryByRank(*by_rank([self.base_bytes, self.peak_bytes], self.device))


@dataclass(frozen=True)
class MemoryByRank:
    """Base and peak of every rank, in bytes, in the order of ranks."""

    base: Sequence[float]
    peak: Sequence[float]

    def peak_fields(self) -> dict[str, Any]:
        """What a step's line says."""
        return {"memory_peak_mb": _mebibytes(self.peak)}

    def summary(self, planned: Sequence[float]) -> dict[str, Any]:
        """What `summary.json` says; `planned` bytes are those of `rank_memory`."""
        return {
            "memory_base_mb": _mebibytes(self.base),
            "memory_peak_mb": _mebibytes(self.peak),
            "memory_planned_mb": _mebibytes(planned),
            "memory_ratio": [round(ratio, 3) for ratio in self.ratios(planned)],
        }

    def ratios(self, planned: Sequence[float]) -> list[float]:
        """(peak - base) / planned of each rank."""
        return [(peak - base) / plan for base, peak, plan in zip(self.base, self.peak, planned, strict=True)]

    def describe(self, planned: Sequence[float]) -> str:
        """A line about the rank that went furthest beyond its plan."""
        ratios = self.ratios(planned)
        rank = max(range(len(ratios)), key=ratios.__getitem__)
        used, plan = (round(size / MEBIBYTE) for size in (self.peak[rank] - self.base[rank], planned[rank]))
        return f"memory: at most {ratios[rank]:.2f} of the plan (rank {rank}: {used} of {plan} MiB, peak above base)"


def _mebibytes(sizes: Sequence[float]) -> list[float]:
    return [round(size / MEBIBYTE, 2) for size in sizes]
