"""A round as it went, by either fidelity."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Piece(NamedTuple):
    """What a rank did for a role from `start` to `end`, named as in a run's trace.json."""

    rank: int
    role: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Played:
    """When a round has ended on each unit, and what it scored, in seconds, [U]; `waited` [U]: for the chunk.

    `arrived`: when the chunk is whole on the ranks that decode; None of a round that only scores.  `pieces` are for the trace.
    """

    ends: Floats
    scored: Floats
    waited: Floats
    arrived: float | None
    pieces: Callable[[], Iterable[Piece]]
