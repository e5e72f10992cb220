"""A round as it went, by either fidelity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Played:
    """When a round has ended on each unit, and what it scored, in seconds, [U]; `waited` [U]: for the chunk.

    `arrived`: when the chunk is whole on the ranks that decode; None of a round that only scores.
    """

    ends: Floats
    scored: Floats
    waited: Floats
    arrived: float | None
