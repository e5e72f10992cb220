"""Runs of trainers that pad: every response of a batch is decoded, scored and trained as far as the batch's longest.

TRL's trainers do so.  Their prompts and responses come batch by batch, so a batch's longest is a function of its number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from oppo_megatron.sim.runs.virtual import VirtualStep

ABOUT = "padded: every sequence of a batch is computed as far as its longest; tokens and lengths are without padding"


@dataclass(frozen=True)
class Padding:
    """`lengths(seq_id)`: tokens of each response; `rows`: sequences of a batch, which follow each other."""

    lengths: Callable[[int], int]
    rows: int
    _longest: dict[int, int] = field(default_factory=dict)

    def padded(self, seq_id: int) -> int:
        """Tokens that are computed of a response."""
        batch = seq_id // self.rows
        if batch not in self._longest:
            self._longest[batch] = max(map(self.lengths, self._ids(batch)))
        return self._longest[batch]

    def unpadded(self, step: VirtualStep) -> VirtualStep:
        """A step of the padded run with the tokens and lengths of its responses themselves."""
        tokens = sum(map(self.lengths, self._ids(step.step - 1)))
        lengths = np.array([self.lengths(seq_id) for seq_id in step.seq_ids.tolist()], dtype=np.int64)
        return replace(step, tokens=tokens, lengths=lengths)

    def _ids(self, batch: int) -> range:
        return range(batch * self.rows, (batch + 1) * self.rows)
