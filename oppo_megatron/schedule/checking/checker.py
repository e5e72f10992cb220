"""Finds out, before it runs, whether a schedule would hang, break causality or overrun a cache.

The checks, in this order: each rank has exactly the actions that the round requires; each message has both its ends, and is
received in the order of sending; the transport's communicators are used in one order (`transport`); the tensor ranks of a
stage agree; on each rank nothing is used before it is there, and no cache overruns (`walk`); a dry run of all ranks comes to
its end (`timeline`).  Every action counts as live: at run time all
ranks alike skip the actions of ended sequences.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace

from oppo_megatron.errors import ScheduleError
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.caches import Budgets
from oppo_megatron.schedule.checking.faults import Fault, FaultKind
from oppo_megatron.schedule.checking.inventory import required_actions
from oppo_megatron.schedule.checking.timeline import COMPUTE, Stuck, Timeline, content_of, simulate
from oppo_megatron.schedule.checking.transport import GLOO, Transport, communicator_faults
from oppo_megatron.schedule.checking.walk import walk_ranks
from oppo_megatron.schedule.links import Link, link_of
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.costs import Costs

__all__ = ["Fault", "FaultKind", "check", "check_timeline", "require_sound"]

Found = list[tuple[int, Action]]
"""Actions with their positions."""


def check(
    schedule: Schedule,
    round: Round,
    site: Site,
    budgets: Budgets,
    costs: Costs | None = None,
    transport: Transport = GLOO,
) -> list[Fault]:
    """Every fault of the schedule, causes before what follows from them; empty where it is sound.

    Raises ScheduleError where round and site do not belong together.
    """
    timeline = simulate(schedule, round, site, costs, transport)
    return check_timeline(schedule, round, site, budgets, timeline, transport)


def check_timeline(
    schedule: Schedule, round: Round, site: Site, budgets: Budgets, timeline: Timeline, transport: Transport = GLOO
) -> list[Fault]:
    """`check` for a schedule that has been simulated already, with the same transport."""
    done = dict.fromkeys(required_actions(round, site), False)
    faults = [*_inventory(schedule, done, round, site)]
    flagged = {(fault.rank, fault.position) for fault in faults}
    faults += [fault for fault in _links(schedule) if (fault.rank, fault.position) not in flagged]
    faults += _missing(schedule, [action for action, is_done in done.items() if not is_done], faults)
    faults += communicator_faults(schedule, transport)
    faults += _tensor_ranks(schedule, site)
    faults += walk_ranks(schedule, round, site, budgets, flagged)
    return faults + [*_deadlocks(timeline)]


def require_sound(
    schedule: Schedule,
    round: Round,
    site: Site,
    budgets: Budgets,
    costs: Costs | None = None,
    transport: Transport = GLOO,
) -> None:
    """Raises ScheduleError with all faults of the schedule, if there are any."""
    faults = check(schedule, round, site, budgets, costs, transport)
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ScheduleError(
            f"{count} in the schedule of round {round.index}, over {transport.name}:\n"
            + "".join(f"  - {f}\n" for f in faults)
        )


def _inventory(schedule: Schedule, done: dict[Action, bool], round: Round, site: Site) -> Iterator[Fault]:
    """Actions that are doubled or foreign.  `done` has the required ones, and is set where they are found."""
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
                message = f"`{action}` stands here a second time; every action is done once; take one away"
                yield Fault(FaultKind.DOUBLED, rank, position, action, message)
            else:
                done[action] = True
            chunk_here = chunk_here or (action.payload is Payload.CHUNK and action.op is Op.RECV)


def _unasked(
    position: int, action: Action, asked: Container[Action], round: Round, site: Site, chunk_here: bool
) -> Fault:
    """The fault of an action that the round does not ask of its rank; `chunk_here`: it has received a chunk before."""

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
            return fault(FaultKind.LOST_PEER, f"has the wrong peer; what it carries goes between these ranks: {peers}")
    return fault(FaultKind.FOREIGN, f"is nothing that round {round.index} asks of rank {action.rank}; take it away")


def _links(schedule: Schedule) -> Iterator[Fault]:
    """Messages without their other end, and those that are asked for in another order than sent."""
    sends: dict[Link, Found] = defaultdict(list)
    receives: dict[Link, Found] = defaultdict(list)
    for rank in sorted(schedule.actions):
        for position, action in enumerate(schedule.of(rank)):
            if action.peer is not None:
                (sends if action.op is Op.SEND else receives)[link_of(action)].append((position, action))
    for link in {**sends, **receives}:
        lonely_sends, paired_sends = _paired(sends.get(link, []), receives.get(link, []))
        lonely_receives, paired_receives = _paired(receives.get(link, []), sends.get(link, []))
        for position, action in lonely_sends:
            message = (
                f"`{action}`: rank {link[1]} does not receive it; every message has two ends; add or take away one"
            )
            yield Fault(FaultKind.LOST_PEER, action.rank, position, action, message)
        for position, action in lonely_receives:
            message = f"`{action}`: rank {link[0]} does not send it; every message has two ends; add or take away one"
            yield Fault(FaultKind.LOST_PEER, action.rank, position, action, message)
        for (_, sent), (position, asked) in zip(paired_sends, paired_receives, strict=True):
            if content_of(sent) != content_of(asked):
                rule = "messages of a link come in the order of sending"
                message = f"`{asked}` would get `{sent}` of rank {sent.rank}; {rule}; give both lists the same order"
                yield Fault(FaultKind.ORDER, asked.rank, position, asked, message)
                break


def _paired(own: Found, others: Found) -> tuple[Found, Found]:
    """Those of one end of a link that have no counterpart at the other end, and those that have one."""
    left = Counter(content_of(action) for _, action in others)
    lonely: Found = []
    paired: Found = []
    for position, action in own:
        content = content_of(action)
        (paired if left[content] > 0 else lonely).append((position, action))
        left[content] -= 1
    return lonely, paired


def _missing(schedule: Schedule, missing: Sequence[Action], faults: Sequence[Fault]) -> Iterator[Fault]:
    """Required actions that no list has.  Where one end of a message is there, it has been named in `faults` already."""
    named = {
        (link_of(a), content_of(a)) for a in (fault.action for fault in faults) if a is not None and a.peer is not None
    }
    for action in missing:
        if action.peer is None or (link_of(action), content_of(action)) not in named:
            message = f"rank {action.rank} has no `{action}`; the round asks for it; add it to the rank's list"
            yield Fault(FaultKind.MISSING, action.rank, len(schedule.of(action.rank)), None, message)


def _tensor_ranks(schedule: Schedule, site: Site) -> Iterator[Fault]:
    """Stages whose tensor ranks are not told to compute the same in the same order."""
    for role, placement in site.placements.items():
        if placement.tp == 1:
            continue
        for first, *others in (placement.stage_ranks(d, p) for d in range(placement.dp) for p in range(placement.pp)):
            reference = _computed(schedule, first, role)
            for other in others:
                for (_, expected), (position, own) in zip(reference, _computed(schedule, other, role), strict=False):
                    if replace(expected, rank=other) != own:
                        rule = f"tensor ranks of a stage do the same in the same order, and rank {first} does"
                        message = f"`{own}`: {rule} `{expected}`; give both the same list"
                        yield Fault(FaultKind.TENSOR_RANKS, other, position, own, message)
                        break


def _computed(schedule: Schedule, rank: int, role: str) -> Found:
    return [(i, a) for i, a in enumerate(schedule.of(rank)) if a.op in COMPUTE and a.role == role]


def _deadlocks(timeline: Timeline) -> Iterator[Fault]:
    """One fault for each cycle of waiting ranks, and for each end of a chain of them."""
    told: set[int] = set()
    for rank in sorted(timeline.stuck):
        chain: dict[int, Stuck] = {}
        at: int | None = rank
        while at is not None and at in timeline.stuck and at not in told and at not in chain:
            chain[at] = timeline.stuck[at]
            at = _awaited(chain[at], timeline)
        again = at in told  # the rest has been told with an earlier chain
        told |= chain.keys()
        waiting = list(chain.values())
        if not waiting or again or waiting[-1].mistaken:  # the latter: told as messages in the wrong order
            continue
        ring = at in chain
        yield _waiting(waiting[list(chain).index(at) :] if at is not None and ring else waiting, ring)


def _awaited(stuck: Stuck, timeline: Timeline) -> int | None:
    """One rank that `stuck` waits for: rather one that will never come."""
    return next((rank for rank in stuck.ranks if rank not in timeline.stuck), next(iter(stuck.ranks), None))


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
