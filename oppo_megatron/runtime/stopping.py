"""Where a response ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from oppo_megatron.config.ppo import ForcedLengthsConfig, RolloutConfig
from oppo_megatron.runtime.sampler import uniforms

LENGTH_DRAW = 2**63  # stands where a token's position stands in its draw, so that no token shares the number


@dataclass(frozen=True)
class Stopping:
    """A response ends at EOS or at its limit.  With `forced` lengths it ends at its limit only (`eos_id` is None)."""

    eos_id: int | None
    max_response_tokens: int
    forced: ForcedLengthsConfig | None = None
    seed: int = 0

    @classmethod
    def of(cls, rollout: RolloutConfig, eos_id: int, seed: int) -> Stopping:
        forced = rollout.forced_lengths
        return cls(None if forced else eos_id, rollout.max_response_tokens, forced, seed)

    def limit(self, seq_id: int) -> int:
        """Largest response of the sequence, in tokens; a forced one is a function of (seed, sequence id) alone."""
        if self.forced is None:
            return self.max_response_tokens
        u = float(uniforms(self.seed, [seq_id], [LENGTH_DRAW])[0])
        deviate = NormalDist().inv_cdf(max(u, 2.0**-53))
        length = round(self.forced.median * math.exp(self.forced.sigma * deviate))
        return min(max(length, 1), self.max_response_tokens)
