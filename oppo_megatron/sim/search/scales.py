"""What a run has measured, as factors on the laws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scales:
    """Factors on the seconds of phases, by role: `serving` on decoding or scoring, `update`; and on all moves of weights.

    `source`: where they come from, empty without any.
    """

    serving: Mapping[str, float] = field(default_factory=dict)
    update: Mapping[str, float] = field(default_factory=dict)
    weights: float = 1.0
    source: str = ""
