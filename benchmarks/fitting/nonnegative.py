"""Least squares with non-negative coefficients, for a few of them."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
MOST = 12


def nonnegative_fit(features: Floats, target: Floats) -> Floats:
    """The x >= 0 [columns] with the least |features x - target|^2.  `features` [rows, columns].

    It is the unconstrained optimum over some subset of columns; all subsets are tried, so there may be 12 columns at most.
    """
    columns = features.shape[1]
    assert columns <= MOST, f"{columns} columns"
    best, least = np.zeros(columns), float(target @ target)
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            found = np.linalg.lstsq(features[:, chosen], target, rcond=None)[0]
            if (found < 0).any():
                continue
            rest = features[:, chosen] @ found - target
            if float(rest @ rest) < least - 1e-12:
                best, least = np.zeros(columns), float(rest @ rest)
                best[list(chosen)] = found
    return best


def relative_fit(features: Floats, target: Floats, fixed: Floats) -> Floats:
    """`nonnegative_fit` of `fixed + features x` to `target`, by relative error."""
    return nonnegative_fit(features / target[:, None], 1 - fixed / target)
