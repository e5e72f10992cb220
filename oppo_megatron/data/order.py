"""The order of rows: one permutation an epoch, keyed by (seed, epoch) alone."""

from __future__ import annotations

import numpy as np

MAX_SEED = 2**64 - 1


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """A permutation of range(num_rows), or range(num_rows) itself.

    Rows are sorted by the raw 64-bit words of Philox4x64, a stream that is the same on every platform and numpy version
    (the methods of `numpy.random.Generator` promise no such thing).
    """
    if not shuffle:
        return list(range(num_rows))
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed={seed} is out of range; choose one from 0 to {MAX_SEED}.")
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_rows)
    return [int(row) for row in np.argsort(words, kind="stable")]
