"""Lengths of a typical batch: what prices are drawn up for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Sampled:
    """Of `batches` batches of `batch` responses, from a run's first prompts on; `length(seq_id)` in tokens."""

    length: Callable[[int], int]
    batch: int
    batches: int = 16

    def middle(self) -> list[int]:
        """Of all lengths in order, those in the middle of each of `batch` equal parts; longest last."""
        ordered = sorted(map(self.length, range(self.batch * self.batches)))
        return ordered[self.batches // 2 :: self.batches]

    def longest(self) -> float:
        """Tokens of a batch's longest response, on average."""
        firsts = range(0, self.batch * self.batches, self.batch)
        return fmean(max(map(self.length, range(first, first + self.batch))) for first in firsts)
