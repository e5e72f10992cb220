"""What a transport asks of a schedule beyond its messages' two ends: gloo's and NCCL's rules as data.

gloo takes every message at once and tells messages apart by their tags.  NCCL has no tags: what is sent over a communicator
is what is received next.  Either end waits in the first use of a communicator until the other has come.  And a send is over
once the other end has taken it; the ones behind it on its communicator wait for that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from oppo_megatron.cores import CONNECTIONS, MOST_CONNECTIONS
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.faults import Fault, FaultKind
from oppo_megatron.schedule.links import link_of


def _role(action: Action) -> Hashable:
    return action.role


@dataclass(frozen=True)
class Transport:
    """The rules of one transport.

    `by_order`: messages of a communicator are matched by their order alone, so that it has one order for both its ends, and
    one stream on each of them.  `communicator` and `stream` say which an action uses: as the engine does it a communicator
    for each link and a CUDA stream for each role.
    `made`: every communicator has been used before the round; otherwise either end waits in its first use for the other.
    `in_flight`: by payload the most messages of a link that may have been sent and not taken; a send beyond that holds
    everything behind it.  A payload that is missing has no limit.  `remedy`: what lets held sends go.
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
        """Whether a send may have to wait."""
        return not self.made or bool(self.in_flight)

    @property
    def free(self) -> Transport:
        """The same where no send has to wait."""
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
"""`nccl`: each CUDA stream goes on by itself, as torch gives every communicator one of its own.  `nccl-one-queue`: streams may
share a hardware queue, which starts work in the order of its launch, and nobody says which do: so it is checked as if all did.  A
hidden state that waits behind another one holds all that is launched after it; NCCL's buffers take tokens and chunks.
`nccl-cold`: communicators are made in the round.
"""


def transport_of(device: str, environment: Mapping[str, str], streams: int) -> Transport:
    """That of a run on devices of this type ("cpu", "cuda") whose ranks have at most so many CUDA streams.

    They go on by themselves if there are enough hardware queues; of these a run takes all, unless its environment says how many.
    """
    if device == "cpu":
        return GLOO
    return NCCL if streams <= _queues(environment) else ONE_QUEUE


def _queues(environment: Mapping[str, str]) -> int:
    """What CUDA and torch make of the variable; one that is no number counts as 1, of which nothing can go wrong."""
    said = environment.get(CONNECTIONS, "").strip() or str(MOST_CONNECTIONS)
    return min(int(said), MOST_CONNECTIONS) if said.isdecimal() else 1


def communicator_faults(schedule: Schedule, transport: Transport) -> Iterator[Fault]:
    """Where an end of a communicator uses it from two streams, and where its two ends use it in different orders."""
    if not transport.by_order:
        return
    ends: dict[Hashable, dict[int, list[tuple[int, Action]]]] = defaultdict(lambda: defaultdict(list))
    for rank in sorted(schedule.actions):
        for position, action in enumerate(schedule.of(rank)):
            if action.peer is not None:
                ends[transport.communicator(action)][rank].append((position, action))
    for communicator in ends.values():
        lists = list(communicator.values())
        for own in lists:
            yield from _streams(own, transport)
        if len(lists) == 2 and len({link_of(action) for own in lists for _, action in own}) > 1:
            yield from _orders(*lists)


def _streams(own: list[tuple[int, Action]], transport: Transport) -> Iterator[Fault]:
    first = own[0][1]
    for position, action in own:
        if transport.stream(action) != transport.stream(first):
            rule = "a communicator is used from one stream, or its operations have no order"
            remedy = "issue both from the same stream, or over two communicators"
            message = f"`{action}` goes over the communicator of `{first}`, from another stream than that one; {rule}; {remedy}"
            yield Fault(FaultKind.COMMUNICATOR, action.rank, position, action, message)
            return


def _orders(own: list[tuple[int, Action]], others: list[tuple[int, Action]]) -> Iterator[Fault]:
    """The first place where the two ends of a communicator of several links are at different messages."""
    for (_, theirs), (position, action) in zip(others, own, strict=False):
        if (link_of(theirs), theirs.micro_batch, theirs.chunk, theirs.step) != (
            link_of(action), action.micro_batch, action.chunk, action.step,
        ):  # fmt: skip
            rule = "both ends use a communicator in one order"
            both = action.op is theirs.op
            way = "send" if action.op is Op.SEND else "receive"
            remedy = (
                f"both {way} first, so group each send with the receive of the other way, or give each way a communicator"
                if both
                else "give both lists the same order"
            )
            message = f"`{action}` meets `{theirs}` of rank {theirs.rank} on their communicator; {rule}; {remedy}"
            yield Fault(FaultKind.COMMUNICATOR, action.rank, position, action, message)
            return
