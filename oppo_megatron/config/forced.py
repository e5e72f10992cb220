"""Forced lengths of responses, for benchmarks and development, not for training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator

from oppo_megatron.uniforms import uniforms_at

MOST_MEDIAN, MOST_SIGMA = 1e9, 10.0
"""Limits of forced log-normal lengths: the longest that can be drawn stays in the range of floats."""
Quantile = Callable[[float], float]
"""From a share in [0, 1) to a length in tokens."""


@dataclass(frozen=True)
class ForcedLengths:
    """Log-normal lengths (`median`, `sigma`), or lengths of a file (`trace`, `column`).

    `scale` multiplies a file's lengths; auto: their 99th percentile is `rollout.max_response_tokens`.
    """

    median: float | None = None
    sigma: float = 1.0
    trace: Path | None = None
    column: str | None = None
    scale: float | Literal["auto"] = "auto"


def log_normal(forced: ForcedLengths) -> Quantile:
    assert forced.median is not None, "checked with the configuration"
    median, sigma = forced.median, forced.sigma
    return lambda u: median * math.exp(sigma * NormalDist().inv_cdf(max(u, 2.0**-53)))


def _check_log_normal(value: Any) -> Any:
    if isinstance(value, list) and not (len(value) == 2 and 0 < value[0] <= MOST_MEDIAN and 0 <= value[1] <= MOST_SIGMA):
        raise ValueError(
            f"[median, sigma] with a median above 0 and up to {MOST_MEDIAN:g} and a sigma from 0 to {MOST_SIGMA:g}, "
            "a CSV file, or [file, column]"
        )
    return value


Given = Annotated[list[float] | Path | tuple[Path, str], AfterValidator(_check_log_normal)]
"""[median, sigma] of log-normal lengths, a trace, or [trace, column]."""


def lengths_of(given: list[float] | Path | tuple[Path, str] | None) -> ForcedLengths | None:
    if given is None:
        return None
    if isinstance(given, Path):
        return ForcedLengths(trace=given)
    if isinstance(given, tuple):
        return ForcedLengths(trace=given[0], column=given[1])
    return ForcedLengths(median=given[0], sigma=given[1])


LENGTH_DRAW = 2**63  # takes the place of a token's position in its draw; no token has this position
KEPT_LENGTHS = 65536  # a length is asked for in every round
DRAWN_AT_ONCE = 256


@dataclass(frozen=True)
class ForcedLimits:
    """The forced length of each sequence, a function of (seed, sequence id), up to `most` tokens."""

    quantile: Quantile
    most: int
    seed: int
    _drawn: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, forced: ForcedLengths, most: int, seed: int, trace: Quantile | None = None) -> ForcedLimits:
        """`trace`: lengths of a named file."""
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
