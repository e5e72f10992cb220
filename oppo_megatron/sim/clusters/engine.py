"""What the engine takes beyond the laws of kernels: the host's time for each layer, and factors on kernels."""

from __future__ import annotations

from dataclasses import dataclass

from oppo_megatron.sim.clusters.sources import Source, assumed, published


@dataclass(frozen=True)
class Engine:
    """Seconds of a layer beyond the laws: `launch_s` where the host launches it, `replay_s` in a decode step.

    `decode`, `read` and `update` are factors on the laws' kernels where tokens are decoded, sequences read, models trained.
    """

    launch_s: float
    replay_s: float
    source: Source
    decode: float = 1.0
    read: float = 1.0
    update: float = 1.0


PUBLISHED = Engine(0.50e-3, 0.15e-3, published("ReaL's generation with and without CUDA graphs; benchmarks/published"))
OF_CPU = Engine(0.0, 0.0, assumed("a processor launches nothing"))
