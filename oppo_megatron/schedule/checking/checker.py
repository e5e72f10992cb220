"""Check, before it runs, whether a schedule would hang, violate causality or overflow a cache.

The checks, in this order: each rank has exactly the actions that the round requires; each message has both ends and is received
in the order sent; communicators are used as the transport requires; the tensor ranks of a stage agree; on each rank nothing is
used before it exists, and no cache overflows (`causality`); a simulation of all ranks completes (`timeline`).  Every action
counts: at run time all ranks skip the same actions of ended sequences.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from oppo_megatron.errors import ScheduleError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.caches import Budgets
from oppo_megatron.schedule.checking.causality import causality_faults
from oppo_megatron.schedule.checking.timeline import COMPUTE, Stuck, Timeline, content_of, simulate
from oppo_megatron.schedule.checking.transport import GLOO, Transport
from oppo_megatron.schedule.links import Link, link_of
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.costs import Costs

Found = list[tuple[int, Action]]
"""Actions with their positions in a rank's list."""


class FaultKind(str, Enum):
    """Kinds of faults; each equals its word (`fault.kind == "deadlock"`)."""

    MISSING = "missing"  # a required action that no list has
    DOUBLED = "doubled"  # an action that a rank has twice
    FOREIGN = "foreign"  # an action that the round does not require of this rank
    LOST_PEER = "lost peer"  # a send without a receive, a receive without a send, a wrong peer
    ORDER = "order"  # messages received in another order than sent; micro-batches out of order
    COMMUNICATOR = "communicator"  # its two ends use it in different orders, or one of them from two streams
    TENSOR_RANKS = "tensor ranks"  # the tensor ranks of a stage have different lists
    CAUSALITY = "causality"  # something is used before it exists
    KV = "kv"  # a cache overflows, or lacks the tokens that a micro-batch continues
    PLAN = "plan"  # a rank has planned another round than its peers
    DEADLOCK = "deadlock"  # ranks wait for each other, or for a message that never comes


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, at `position` of the list of `rank`.

    `action` is None if the list lacks the action; `position` is then the list's end.  `message` gives the fault, the rule that it
    breaks, and the remedy.
    """

    kind: FaultKind
    rank: int
    position: int
    action: Action | None
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank}, action {self.position}, {self.kind.value}: {self.message}"


def check(
    schedule: Schedule,
    round: Round,
    site: Site,
    budgets: Budgets,
    costs: Costs | None = None,
    transport: Transport = GLOO,
) -> list[Fault]:
    """Return every fault of the schedule, causes before consequences; an empty list if it is sound.

    Raises ScheduleError if round and site do not belong together.
    """
    return check_timeline(schedule, round, site, budgets, simulate(schedule, round, site, costs, transport), transport)


def check_timeline(
    schedule: Schedule, round: Round, site: Site, budgets: Budgets, timeline: Timeline, transport: Transport = GLOO
) -> list[Fault]:
    """`check` for a schedule that has already been simulated with the same transport."""
    done = dict.fromkeys(_required(round, site), False)
    faults = [*_inventory(schedule, done, round, site)]
    flagged = {(fault.rank, fault.position) for fault in faults}
    faults += [fault for fault in _links(schedule) if (fault.rank, fault.position) not in flagged]
    faults += _missing(schedule, [action for action, is_done in done.items() if not is_done], faults)
    faults += communicator_faults(schedule, transport)
    faults += _tensor_ranks(schedule, site)
    faults += [
        Fault(FaultKind(kind), rank, position, action, f"`{action}` {text}")
        for kind, rank, position, action, text in causality_faults(schedule, round, site, budgets, flagged)
    ]
    return faults + [*_deadlocks(timeline)]


def require_sound(
    schedule: Schedule,
    round: Round,
    site: Site,
    budgets: Budgets,
    costs: Costs | None = None,
    transport: Transport = GLOO,
) -> None:
    """Raise ScheduleError with all faults of the schedule, if it has any."""
    faults = check(schedule, round, site, budgets, costs, transport)
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ScheduleError(
            f"{count} in the schedule of round {round.index}, over {transport.name}:\n"
            + "".join(f"  - {f}\n" for f in faults)
        )


def _required(round_: Round, site: Site) -> Iterator[Action]:
    """Yield each action that the round requires, of all ranks, in no particular order.  Raises ScheduleError as `check` does."""
    for role, replicas in (("actor", round_.decode), *round_.prefill.items()):
        dp = site.placements[role].dp if role in site.placements else 0
        if len(replicas) > dp:
            raise ScheduleError(
                f"the round has work for {len(replicas)} replicas of the {role} role, which has {dp}; plan the round for "
                "the same layout"
            )
    for role, replicas in round_.prefill.items():
        for replica, batches in enumerate(replicas):
            for micro_batch in range(len(batches)):
                yield from _required_prefill(round_, site.placements[role], role, replica, micro_batch)
    for replica, batches in enumerate(round_.decode):
        for micro_batch in range(len(batches)):
            for step in range(round_.steps):
                yield from _required_decode(round_, site.placements["actor"], replica, micro_batch, step)
    if round_.decodes:
        placement, key = site.placements["actor"], ("actor", 0, round_.index)
        if placement.dp > 1:
            yield from (Action(rank, Op.GATHER, *key) for rank in placement.ranks)
        for listener, sender in site.fed_by.items():
            yield Action(sender, Op.SEND, *key, None, Payload.CHUNK, listener)
            yield Action(listener, Op.RECV, *key, None, Payload.CHUNK, sender)


def _required_prefill(
    round_: Round, placement: RolePlacement, role: str, replica: int, micro_batch: int
) -> Iterator[Action]:
    chunk = round_.index if role == "actor" else round_.index - 1
    for stage in range(placement.pp):
        for rank in placement.stage_ranks(replica, stage):
            yield Action(rank, Op.PREFILL, role, micro_batch, chunk)
            if role != "actor" and stage == placement.pp - 1:
                yield Action(rank, Op.SCORE, role, micro_batch, chunk)
    yield from _required_hidden(placement, role, replica, micro_batch, chunk, None)


def _required_decode(
    round_: Round, placement: RolePlacement, replica: int, micro_batch: int, step: int
) -> Iterator[Action]:
    last, key = placement.pp - 1, ("actor", micro_batch, round_.index, step)
    for stage in range(placement.pp):
        for shard, rank in enumerate(placement.stage_ranks(replica, stage)):
            yield Action(rank, Op.DECODE, *key)
            drawn_by = placement.rank(replica, last, shard)
            if stage == last:
                yield Action(rank, Op.SAMPLE, *key)
            else:
                yield Action(drawn_by, Op.SEND, *key, Payload.TOKENS, rank)
                yield Action(rank, Op.RECV, *key, Payload.TOKENS, drawn_by)
    yield from _required_hidden(placement, "actor", replica, micro_batch, round_.index, step)


def _required_hidden(
    placement: RolePlacement, role: str, replica: int, micro_batch: int, chunk: int, step: int | None
) -> Iterator[Action]:
    for stage in range(placement.pp - 1):
        ends = zip(placement.stage_ranks(replica, stage), placement.stage_ranks(replica, stage + 1), strict=True)
        for here, there in ends:
            yield Action(here, Op.SEND, role, micro_batch, chunk, step, Payload.HIDDEN, there)
            yield Action(there, Op.RECV, role, micro_batch, chunk, step, Payload.HIDDEN, here)


def _inventory(schedule: Schedule, done: dict[Action, bool], round: Round, site: Site) -> Iterator[Fault]:
    """Yield doubled and foreign actions.  `done` has the required actions as keys; those found are set to True."""
    for rank in sorted(schedule.actions):
        chunk_here = False
        for position, action in enumerate(schedule.of(rank)):
            is_done = done.get(action)
            if action.rank != rank:
                message = f"`{action}` names rank {action.rank}; a list holds its own rank's actions; move it there"
                yield Fault(FaultKind.FOREIGN, rank, position, action, message)
            elif is_done is None:
                yield _unasked(position, action, done, round, site, chunk_here)
            elif is_done:
                message = f"`{action}` occurs a second time; every action is done once; remove one"
                yield Fault(FaultKind.DOUBLED, rank, position, action, message)
            else:
                done[action] = True
            chunk_here = chunk_here or (action.payload is Payload.CHUNK and action.op is Op.RECV)


def _unasked(
    position: int, action: Action, asked: Container[Action], round: Round, site: Site, chunk_here: bool
) -> Fault:
    """Return the fault of an action that the round does not require; `chunk_here`: its rank has received a chunk before."""

    def fault(kind: FaultKind, message: str) -> Fault:
        return Fault(kind, action.rank, position, action, f"`{action}` {message}")

    if action.role not in site.placements:
        return fault(FaultKind.FOREIGN, f"is of no role of the site ({', '.join(site.placements)}); correct the role")
    if action.op in COMPUTE and action.rank not in site.placements[action.role].ranks:
        ranks = list(site.placements[action.role].ranks)
        return fault(FaultKind.FOREIGN, f"is not for rank {action.rank}: {action.role} is on ranks {ranks}; move it")
    scores = action.op in (Op.PREFILL, Op.SCORE) and action.role != "actor"
    if scores and action.chunk >= round.index and not chunk_here:
        rule = f"only chunks before {round.index} are known when the round begins"
        return fault(FaultKind.CAUSALITY, f"uses a chunk before it has been decoded; {rule}; do it a round later")
    if action.peer is not None:
        peers = [peer for peer in site.ranks if replace(action, peer=peer) in asked]
        if peers:
            return fault(FaultKind.LOST_PEER, f"has the wrong peer; its message goes between these ranks: {peers}")
    return fault(FaultKind.FOREIGN, f"is nothing that round {round.index} asks of rank {action.rank}; remove it")


def _links(schedule: Schedule) -> Iterator[Fault]:
    """Yield messages that lack an end, and the first of each link that is received in another order than sent."""
    sends: dict[Link, Found] = defaultdict(list)
    receives: dict[Link, Found] = defaultdict(list)
    for rank in sorted(schedule.actions):
        for position, action in enumerate(schedule.of(rank)):
            if action.peer is not None:
                (sends if action.op is Op.SEND else receives)[link_of(action)].append((position, action))
    rule = "every message has two ends; add or remove one"
    for link in {**sends, **receives}:
        lonely_sends, paired_sends = _paired(sends.get(link, []), receives.get(link, []))
        lonely_receives, paired_receives = _paired(receives.get(link, []), sends.get(link, []))
        for position, action in lonely_sends:
            message = f"`{action}`: rank {link[1]} does not receive it; {rule}"
            yield Fault(FaultKind.LOST_PEER, action.rank, position, action, message)
        for position, action in lonely_receives:
            message = f"`{action}`: rank {link[0]} does not send it; {rule}"
            yield Fault(FaultKind.LOST_PEER, action.rank, position, action, message)
        for (_, sent), (position, asked) in zip(paired_sends, paired_receives, strict=True):
            if content_of(sent) != content_of(asked):
                order = "messages of a link arrive in the order sent; give both lists the same order"
                message = f"`{asked}` would get `{sent}` of rank {sent.rank}; {order}"
                yield Fault(FaultKind.ORDER, asked.rank, position, asked, message)
                break


def _paired(own: Found, others: Found) -> tuple[Found, Found]:
    """Return the messages of one end of a link without a counterpart at the other end, and those with one."""
    left = Counter(content_of(action) for _, action in others)
    lonely: Found = []
    paired: Found = []
    for position, action in own:
        content = content_of(action)
        (paired if left[content] > 0 else lonely).append((position, action))
        left[content] -= 1
    return lonely, paired


def _missing(schedule: Schedule, missing: Sequence[Action], faults: Sequence[Fault]) -> Iterator[Fault]:
    """Yield required actions that no list has, except messages whose other end `faults` names."""
    named = {
        (link_of(a), content_of(a)) for a in (fault.action for fault in faults) if a is not None and a.peer is not None
    }
    for action in missing:
        if action.peer is None or (link_of(action), content_of(action)) not in named:
            message = f"rank {action.rank} has no `{action}`; the round asks for it; add it to the rank's list"
            yield Fault(FaultKind.MISSING, action.rank, len(schedule.of(action.rank)), None, message)


def communicator_faults(schedule: Schedule, transport: Transport) -> Iterator[Fault]:
    """Yield communicators that one end uses from two streams, or both ends in different orders."""
    ends: dict[Hashable, dict[int, Found]] = defaultdict(lambda: defaultdict(list))
    for rank in sorted(schedule.actions) if transport.by_order else ():
        for position, action in enumerate(schedule.of(rank)):
            if action.peer is not None:
                ends[transport.communicator(action)][rank].append((position, action))
    for communicator in ends.values():
        lists = list(communicator.values())
        for own in lists:
            first = own[0][1]
            other = next((each for each in own if transport.stream(each[1]) != transport.stream(first)), None)
            if other is not None:
                position, action = other
                rule = "a communicator is used from one stream, or its operations have no order"
                remedy = "issue both from the same stream, or over two communicators"
                message = f"`{action}` goes over the communicator of `{first}`, from another stream; {rule}; {remedy}"
                yield Fault(FaultKind.COMMUNICATOR, action.rank, position, action, message)
        if len(lists) == 2 and len({link_of(action) for own in lists for _, action in own}) > 1:
            yield from _orders(*lists)


def _orders(own: Found, others: Found) -> Iterator[Fault]:
    """Yield the first position at which the two ends of a communicator of several links have different messages."""
    for (_, theirs), (position, action) in zip(others, own, strict=False):
        if (link_of(theirs), content_of(theirs)) != (link_of(action), content_of(action)):
            way = "send" if action.op is Op.SEND else "receive"
            remedy = (
                f"both {way} first, so group each send with the receive of the other way, or give each way a communicator"
                if action.op is theirs.op
                else "give both lists the same order"
            )
            rule = "both ends use a communicator in one order"
            message = f"`{action}` meets `{theirs}` of rank {theirs.rank} on their communicator; {rule}; {remedy}"
            yield Fault(FaultKind.COMMUNICATOR, action.rank, position, action, message)
            return


def _tensor_ranks(schedule: Schedule, site: Site) -> Iterator[Fault]:
    """Yield the first difference between the compute actions of a stage's tensor ranks."""

    def computed(rank: int, role: str) -> Found:
        return [(i, a) for i, a in enumerate(schedule.of(rank)) if a.op in COMPUTE and a.role == role]

    for role, placement in site.placements.items():
        if placement.tp == 1:
            continue
        for first, *others in (placement.stage_ranks(d, p) for d in range(placement.dp) for p in range(placement.pp)):
            reference = computed(first, role)
            for other in others:
                for (_, expected), (position, own) in zip(reference, computed(other, role), strict=False):
                    if replace(expected, rank=other) != own:
                        rule = f"tensor ranks of a stage do the same in the same order, and rank {first} does"
                        message = f"`{own}`: {rule} `{expected}`; give both the same list"
                        yield Fault(FaultKind.TENSOR_RANKS, other, position, own, message)
                        break


def _deadlocks(timeline: Timeline) -> Iterator[Fault]:
    """Yield one fault for each cycle of waiting ranks, and for each end of a chain of them."""
    seen: set[int] = set()
    for rank in sorted(timeline.stuck):
        chain: dict[int, Stuck] = {}
        at: int | None = rank
        while at is not None and at in timeline.stuck and at not in seen and at not in chain:
            chain[at] = timeline.stuck[at]
            # If it waits for several ranks, prefer one that will never come.
            awaited = chain[at].ranks
            at = next((other for other in awaited if other not in timeline.stuck), next(iter(awaited), None))
        reported = at in seen  # the rest belongs to an earlier chain
        seen |= chain.keys()
        waiting = list(chain.values())
        if not waiting or reported or waiting[-1].mistaken:  # the latter: reported as messages in the wrong order
            continue
        ring = at in chain
        yield _waiting(waiting[list(chain).index(at) :] if at is not None and ring else waiting, ring)


def _waiting(chain: list[Stuck], ring: bool) -> Fault:
    steps = [
        f"rank {stuck.rank} waits at `{stuck.action}`{f' ({stuck.held})' if stuck.held else ''}" for stuck in chain
    ]
    end = f"for rank {chain[0].rank}" if ring else f"where {chain[-1].reason}"
    rule = "an awaited action must come before the wait for it" if ring else "some rank must do the awaited action"
    remedies = dict.fromkeys(stuck.remedy for stuck in chain if stuck.remedy)
    remedy = ", or ".join([*remedies, "put the awaited action earlier in its list, or add it"])
    last = chain[0] if ring else chain[-1]
    message = f"{', for '.join(steps)}, {end}; {rule}; {remedy}"
    return Fault(FaultKind.DEADLOCK, last.rank, last.position, last.action, message)
