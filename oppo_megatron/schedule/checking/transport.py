"""Rules of gloo and NCCL for a schedule.

gloo accepts every message at once. Over NCCL, both ends wait in a communicator's first use, and a send ends when received;
without tags, each directed link has a communicator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from oppo_megatron.cores import CONNECTIONS, MOST_CONNECTIONS
from oppo_megatron.schedule.actions import Payload


@dataclass(frozen=True)
class Transport:
    """`made`: links used before the round. `in_flight`: most unreceived messages of a link (missing: no limit)."""

    name: str
    made: bool = True
    in_flight: Mapping[Payload | None, int] = field(default_factory=dict)
    remedy: str = ""

    @property
    def holds(self) -> bool:
        return not self.made or bool(self.in_flight)

    @property
    def free(self) -> Transport:
        return replace(self, made=True, in_flight={})


GLOO = Transport("gloo")
NCCL = Transport("nccl")
COLD = Transport("nccl-cold", made=False, remedy="make the communicators before the round")
ONE_QUEUE = Transport(
    "nccl-one-queue",
    in_flight={Payload.HIDDEN: 1},
    remedy=f"set {CONNECTIONS}={MOST_CONNECTIONS}, or take overlap.schedule=intra",
)
TRANSPORTS: Mapping[str, Transport] = {each.name: each for each in (GLOO, NCCL, COLD, ONE_QUEUE)}
"""`nccl`: every communicator has its own CUDA stream. `nccl-one-queue`: the check assumes that all streams share a hardware
queue, because CUDA does not say which do; a waiting hidden state then blocks later work (NCCL buffers tokens and chunks).
`nccl-cold`: communicators are made during the round.
"""


def transport_of(device: str, environment: Mapping[str, str], streams: int) -> Transport:
    """`device` is "cpu" or "cuda"; `streams`: most CUDA streams per rank."""
    if device == "cpu":
        return GLOO
    value = environment.get(CONNECTIONS, "").strip() or str(MOST_CONNECTIONS)
    # CUDA and torch may read other values differently; 1 queue is the strictest check.
    queues = min(int(value), MOST_CONNECTIONS) if value.isdecimal() else 1
    return NCCL if streams <= queues else ONE_QUEUE
