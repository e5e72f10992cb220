"""Rule `length`: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthRule:
    """0 up to max - buffer tokens, from there linearly down to -1 at `max_tokens`, and -1 beyond."""

    max_tokens: int
    buffer_tokens: int

    def score(self, num_tokens: int) -> float:
        over = num_tokens - (self.max_tokens - self.buffer_tokens)
        return -min(max(over, 0) / self.buffer_tokens, 1.0)
