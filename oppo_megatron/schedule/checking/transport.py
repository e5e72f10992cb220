"""The rules of gloo and NCCL that a schedule must keep, as data.

gloo accepts every message at once and distinguishes messages by tags.  NCCL has no tags: messages of a communicator arrive in
the order sent.  In the first use of a communicator either end waits for the other.  A send ends when the other end has received
the message; later sends over the same communicator wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

from oppo_megatron.cores import CONNECTIONS, MOST_CONNECTIONS
from oppo_megatron.schedule.actions import Action, Payload
from oppo_megatron.schedule.links import link_of


def _role(action: Action) -> Hashable:
    return action.role


@dataclass(frozen=True)
class Transport:
    """The rules of one transport.

    `by_order`: messages of a communicator are matched by order alone, so both ends must use it in one order, each from one
    stream.  `communicator` and `stream` map an action to its own: the engine has one per link and one per role.
    `made`: every communicator was used before the round; otherwise either end waits in its first use for the other.
    `in_flight`: the most unreceived messages of a link, by payload (missing: no limit); a further send blocks its rank.
    `remedy`: how to avoid blocked sends.
    """

    name: str
    by_order: bool = True
    made: bool = True
    in_flight: Mapping[Payload | None, int] = field(default_factory=dict)
    communicator: Callable[[Action], Hashable] = link_of
    stream: Callable[[Action], Hashable] = _role
    remedy: str = ""

    @property
    def holds(self) -> bool:
        """True if a send may have to wait."""
        return not self.made or bool(self.in_flight)

    @property
    def free(self) -> Transport:
        """This transport with sends that never wait."""
        return replace(self, made=True, in_flight={})


GLOO = Transport("gloo", by_order=False)
NCCL = Transport("nccl")
COLD = replace(NCCL, name="nccl-cold", made=False, remedy="make the communicators before the round")
ONE_QUEUE = replace(
    NCCL,
    name="nccl-one-queue",
    in_flight={Payload.HIDDEN: 1},
    remedy=f"set {CONNECTIONS}={MOST_CONNECTIONS}, or take overlap.schedule=intra",
)
TRANSPORTS: Mapping[str, Transport] = {each.name: each for each in (GLOO, NCCL, COLD, ONE_QUEUE)}
"""`nccl`: CUDA streams are independent, and torch gives every communicator its own.  `nccl-one-queue`: streams may share a
hardware queue, which starts work in launch order; CUDA does not say which, so the check assumes that all do.  A hidden state that
waits for an earlier one blocks all work launched after it; NCCL's buffers hold tokens and chunks.  `nccl-cold`: communicators are
made during the round.
"""


def transport_of(device: str, environment: Mapping[str, str], streams: int) -> Transport:
    """Return the transport of a run on devices of this type ("cpu", "cuda") with at most `streams` CUDA streams per rank.

    Streams are independent if there are enough hardware queues.  A run uses all of them unless the environment sets a number.
    """
    if device == "cpu":
        return GLOO
    value = environment.get(CONNECTIONS, "").strip() or str(MOST_CONNECTIONS)
    # CUDA and torch may read another value differently; with 1 queue the check is at its strictest.
    queues = min(int(value), MOST_CONNECTIONS) if value.isdecimal() else 1
    return NCCL if streams <= queues else ONE_QUEUE
