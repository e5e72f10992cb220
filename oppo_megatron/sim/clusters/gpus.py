"""Processors by name: peaks, memory, and the constants of a layer's laws (`laws/layer.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass as checked

from oppo_megatron.sim.clusters.sources import Source, assumed, published

LAYERS = "microsoft/vidur, data/profiling/compute, commit 7d47513; fitted"
PEAKS = "stas00/ml-engineering, compute/accelerator"
MOST_POWER = 16.0
"""Beyond it the smooth maximum is the larger part within 4 %, and seconds to that power leave the range of floats."""


STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Share = Annotated[float, Strict(), Field(ge=1e-6, le=2)]
Seconds = Annotated[float, Strict(), Field(ge=0, le=60)]


@checked(frozen=True, config=STRICT)
class Efficiencies:
    """Constants of a layer's laws: pure numbers (of a fit, not shares of a peak) and seconds.

    `elementwise`: norms, rotations, activation and sums as fused kernels; `plain`: one large pass over tensors, as a sum of two.
    """

    compute: Share
    memory: Share
    fixed_s: Seconds
    power: Annotated[float, Strict(), Field(ge=1, le=MOST_POWER)]
    elementwise: Share
    elementwise_fixed_s: Seconds
    plain: Share
    attention: Share = 0.5


@dataclass(frozen=True)
class Gpu:
    """One processor: operations per second in bfloat16, bytes per second of its memory, bytes of memory.

    `on_cpu`: a core of a CPU, which launches nothing. `sources`: by the name of a field.
    """

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: float
    efficiencies: Efficiencies
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False)
    on_cpu: bool = False


A100_LAWS = Efficiencies(0.74, 0.82, 20e-6, 1.4, 0.49, 10e-6, 0.85)
H100_LAWS = Efficiencies(0.76, 1.00, 25e-6, 1.3, 0.56, 10e-6, 0.96)
CPU_LAWS = Efficiencies(0.8, 0.8, 20e-6, 1.3, 0.5, 20e-6, 0.8)
ATTENTION = {"efficiencies.attention": assumed("half of the peak while prompts are read")}


def _sources(peaks: Source, memory: Source, laws: Source) -> Mapping[str, Source]:
    return {"flops": peaks, "bytes_per_s": peaks, "memory_bytes": memory, "efficiencies": laws} | ATTENTION


SHEET = published("NVIDIA's data sheet")
CORE = assumed("a core of a server; measure yours with benchmarks/machine.py")
GPUS: Mapping[str, Gpu] = {
    "a100-80": Gpu("a100-80", 312e12, 2.039e12, 80e9, A100_LAWS, _sources(SHEET, SHEET, published(LAYERS))),
    "h100": Gpu("h100", 989e12, 3.35e12, 80e9, H100_LAWS, _sources(published(PEAKS), SHEET, published(LAYERS))),
    "h200": Gpu(
        "h200", 989e12, 4.8e12, 141e9, H100_LAWS,
        _sources(published(PEAKS), SHEET, assumed("as an H100's: no layers measured on an H200 were found")),
    ),
    "cpu": Gpu(
        "cpu", 0.1e12, 10e9, 8e9, CPU_LAWS,
        _sources(CORE, CORE, assumed("no layers measured")), on_cpu=True,
    ),
}  # fmt: skip
"""`cpu` is one core."""
