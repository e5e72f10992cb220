"""Random numbers from (seed, sequence id, position) on the host; `sampler` has them on devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from oppo_megatron.chunks import Ints

WORD = 2**64 - 1


def uniforms(seed: int, seq_ids: Sequence[int], positions: Sequence[int]) -> list[float]:
    """A number in [0, 1) each: 53 bits of a splitmix64 chain (Steele et al. 2014)."""
    rows = zip(seq_ids, positions, strict=True)
    return [(_mix(row_state(seed, seq_id) ^ position) >> 11) * 2.0**-53 for seq_id, position in rows]


def uniforms_at(seed: int, seq_ids: Ints, position: int) -> list[float]:
    states = _mixed(np.uint64(_mix(seed)) ^ seq_ids.astype(np.uint64))
    found: list[float] = ((_mixed(states ^ np.uint64(position)) >> np.uint64(11)) * 2.0**-53).tolist()
    return found


@lru_cache(maxsize=2**16)
def row_state(seed: int, seq_id: int) -> int:
    return _mix(_mix(seed) ^ seq_id)


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_mix` of each."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
