"""Lengths at which responses end instead of at EOS, by sequence (`debug.forced_lengths`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from oppo_megatron.config.debug import ForcedLengths, Quantile, log_normal
from oppo_megatron.uniforms import uniforms_at

LENGTH_DRAW = 2**63  # takes the place of a token's position in its draw; no token has this position
KEPT_LENGTHS = 65536  # a length is asked for in every round
DRAWN_AT_ONCE = 256


@dataclass(frozen=True)
class ForcedLimits:
    """The forced length of each sequence, from 1 to `most` tokens: a function of (seed, sequence id) alone."""

    quantile: Quantile
    most: int
    seed: int
    _drawn: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, forced: ForcedLengths, most: int, seed: int, trace: Quantile | None = None) -> ForcedLimits:
        """`trace`: the lengths of the file that `forced` names, if it names one."""
        return cls(trace or log_normal(forced), most, seed)

    def __call__(self, seq_id: int) -> int:
        if seq_id not in self._drawn:
            if len(self._drawn) >= KEPT_LENGTHS:
                self._drawn.clear()
            first = seq_id - seq_id % DRAWN_AT_ONCE
            seq_ids = range(first, first + DRAWN_AT_ONCE)
            shares = uniforms_at(self.seed, np.arange(first, seq_ids.stop), LENGTH_DRAW)
            lengths = [round(self.quantile(share)) for share in shares]
            self._drawn.update(zip(seq_ids, [min(max(length, 1), self.most) for length in lengths], strict=True))
        return self._drawn[seq_id]
