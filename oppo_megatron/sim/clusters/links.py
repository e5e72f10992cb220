"""Links within a node and between nodes.

Bus bandwidth is defined as in nccl-tests (doc/PERFORMANCE.md): payload times `wire_factor` over seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field, Strict
from pydantic.dataclasses import dataclass as checked

from oppo_megatron.sim.clusters.gpus import STRICT, Seconds
from oppo_megatron.sim.clusters.sources import Source, assumed, published

SWEEPS = "microsoft/vidur, data/profiling/network, commit 7d47513; fitted"


@checked(frozen=True, config=STRICT)
class Line:
    """Seconds of a message: `alpha_s`, and bytes on the wire over `bytes_per_s`."""

    alpha_s: Seconds
    bytes_per_s: Annotated[float, Strict(), Field(ge=1e3, le=1e18)]

    def seconds(self, payload: float, factor: float) -> float:
        """Seconds of `payload` bytes, which pass the wire `factor` times."""
        return self.alpha_s + factor * payload / self.bytes_per_s

    @property
    def peak(self) -> float:
        return self.bytes_per_s


@dataclass(frozen=True)
class Curve:
    """Bus bandwidth by payload: linear between the logarithms of both, constant beyond; a message takes at least `alpha_s`."""

    alpha_s: float
    payloads: tuple[float, ...]
    bytes_per_s: tuple[float, ...]

    def seconds(self, payload: float, factor: float) -> float:
        rate = np.exp(np.interp(np.log(max(payload, 1.0)), np.log(self.payloads), np.log(self.bytes_per_s)))
        return max(self.alpha_s, factor * payload / float(rate))

    @property
    def peak(self) -> float:
        return self.bytes_per_s[-1]


Law = Line | Curve


@dataclass(frozen=True)
class Inside:
    """Links within a node: collectives by number of ranks, and messages between two."""

    collective: Mapping[int, Law]
    send: Law
    source: Source = field(compare=False)

    def of_ranks(self, ranks: int) -> Law:
        """Law of the smallest measured group of at least `ranks`, else of the largest."""
        return self.collective[min((n for n in self.collective if n >= ranks), default=max(self.collective))]


@dataclass(frozen=True)
class Between:
    """The network: each node has `nics` of `bytes_per_s` each, shared by its ranks."""

    alpha_s: float
    bytes_per_s: float
    nics: int
    source: Source = field(compare=False)

    @property
    def node_bytes_per_s(self) -> float:
        return self.nics * self.bytes_per_s


GB, US, MIB = 1e9, 1e-6, 2**20
H200_MIB = (1 / 32, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
H200_GB = (
    3.15, 39.93, 64.53, 107.16, 155.53, 219.89, 275.84, 346.51, 401.93, 436.15, 450.29, 463.58,
    469.17, 473.10, 477.45, 482.26,
)  # fmt: skip
"""As measured from 1 MiB; below, the table has the host's time, and the same source has 3.15 GB/s at 32 KiB for queued calls."""
H200_CURVE = Curve(18 * US, tuple(size * MIB for size in H200_MIB), tuple(rate * GB for rate in H200_GB))
INSIDE: Mapping[str, Inside] = {
    "a100-80": Inside(
        {2: Line(35.8 * US, 158.4 * GB), 4: Line(28.7 * US, 153.9 * GB), 8: Line(39.0 * US, 151.9 * GB)},
        Line(13.2 * US, 285.8 * GB),
        published(SWEEPS),
    ),
    "h100": Inside(
        {2: Line(16.6 * US, 282.1 * GB), 4: Line(30.6 * US, 379.6 * GB), 8: Line(28.6 * US, 338.9 * GB)},
        Line(7.6 * US, 357.5 * GB),
        published(SWEEPS),
    ),
    "h200": Inside(
        {8: H200_CURVE},
        Line(7.6 * US, 357.5 * GB),
        published("stas00/ml-engineering, all-reduce of 8 H200, commit c53741b; fewer ranks as 8, messages as an H100's"),
    ),
    "cpu": Inside({8: Line(300 * US, 1 * GB)}, Line(150 * US, 1 * GB), assumed("gloo over loopback")),
}  # fmt: skip
