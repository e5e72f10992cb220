"""Which ranks' watchdogs read each other's notes: circles of neighbours, whose speakers read the others' summaries
(`summaries.py`)."""

from __future__ import annotations

from dataclasses import dataclass

CIRCLE = 32


@dataclass(frozen=True)
class Circles:
    """`size` ranks, `most` neighbours a circle."""

    size: int
    most: int = CIRCLE

    @property
    def count(self) -> int:
        return -(-self.size // self.most)

    def number(self, rank: int) -> int:
        """The circle of a rank."""
        return rank // self.most

    def members(self, number: int) -> range:
        """The ranks of a circle."""
        return range(number * self.most, min(self.size, (number + 1) * self.most))

    def notes_read(self, rank: int, speaks: bool) -> int:
        """Notes that a rank reads each tick, summaries among them."""
        others = self.count if speaks and self.count > 1 else 0
        return len(self.members(self.number(rank))) + others
