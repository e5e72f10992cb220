"""A quick proof that a schedule of compute actions is sound once it has its messages.

`prove` looks at compute actions alone, in one pass and one run of whole numbers; messages need not be there yet.  Where it
says yes, `check` finds nothing but, possibly, caches that overrun (`require_room`).  Where it says no, `check` says why.

It asks three things.  Call a decode with its sample, or a prefill with its score, a *unit*.

1. On each rank a unit's actions stand together: nothing comes between a decode and its sample, a prefill and its score.
2. Every tensor rank of every stage has exactly the units that the round asks of it, in the one order that is allowed: the
   actor's prefills by micro-batch, then its decode micro-steps by step and micro-batch; a scorer's prefills by micro-batch.
3. All units can be done: each is done by the tensor ranks of its stage together, when it is next on all of them, after the
   same unit of the stage before, and a decode micro-step after the last stage's micro-step of the step before.

`add_communication` puts what a unit receives directly before it and what it sends directly behind it; then come the tokens
of the last step, and what spreads the chunk.  So by 1 and 2:

- Nothing is missing, doubled or foreign, and each message has two ends, since the units of both ends are there.
- A link's messages are sent and asked for in the order of its stage's units, which is one on both ends; tokens of the last
  step come in the order of their micro-batches, on both ends.
- A hidden state is used by the unit before which it was received, or sent on by the unit that has made it, and no other of
  the role comes between; tokens are there before the step that continues them; a chunk is whole behind all tokens.

And by 3 there is an order of all units in which each stands behind everything that it waits for.  Ranks follow it without
a deadlock, as sends do not wait, a receive waits for a unit before it in that order, and behind the units there are only
receives of tokens that have been drawn, a gather of ranks that all come to it, and chunks, which a rank receives from one
that comes before it in the order of `Site.feeds`, and then passes on.

Where a generator gives its timetable, lists are made of that, and `runs_in_time` proves them without any action: times in which
each unit comes behind what it waits for are such an order.

Where the transport may hold a hidden state behind others of its link, a rank goes on from the unit that sends it once the next
stage has done the unit that takes the first of those: times show that quickly (`holding.py`), or else the run of 3 does.  What
else a transport asks follows from the above: a communicator is that of one link, whose messages have one order and come from
the stream of one role.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.caches import Budgets
from oppo_megatron.schedule.checking.checker import require_sound
from oppo_megatron.schedule.checking.holding import sends_pass
from oppo_megatron.schedule.checking.timeline import simulate
from oppo_megatron.schedule.checking.transport import GLOO, Transport
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.communication import add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.timetable import Timetable, count_of

Unit = tuple[Op, int, int, int | None]
"""Decode or prefill, micro-batch, chunk, decode step."""

Place = tuple[str, int, int]
"""(role, replica, stage)"""


@dataclass
class _Stage:
    """One pipeline stage: the units that it has to do, how many it has done, and whom it waits for.

    Unit n waits for n + 1 units of the stage before, and from the second decode step on for n + 1 - `micro_batches` of the
    last stage; `first` is the first unit that does.  Where a send may be held, a rank waits behind unit n until the stage
    after has done n + 1 - (what its link lets go untaken).
    """

    ranks: tuple[int, ...]
    units: Sequence[Unit]
    before: _Stage | None
    micro_batches: int
    first: int
    done: int = 0
    woken: tuple[int, ...] = ()
    after: _Stage | None = None

    def __post_init__(self) -> None:
        self.last = self


def require_provable(
    computes: Schedule, round_: Round, site: Site, budgets: Budgets, costs: Costs, transport: Transport = GLOO
) -> None:
    """`require_sound` of a schedule of compute actions, quickly where there is a proof.  Raises ScheduleError.

    The caches hold the round, as `require_room` says.
    """
    if not prove(computes, round_, site, transport):
        require_sound(add_communication(computes, round_, site), round_, site, budgets, costs, transport)


def prove(computes: Schedule, round_: Round, site: Site, transport: Transport = GLOO) -> bool:
    """Whether the compute actions are those of a schedule that is sound over the transport."""
    table = computes.actions
    timed = table if isinstance(table, Timetable) and runs_in_time(table, round_, site) else None
    if not transport.made or set(transport.in_flight) - {Payload.HIDDEN}:
        return timed is not None and _comes_to_an_end(computes, round_, site, transport)
    most = transport.in_flight.get(Payload.HIDDEN)
    if timed is not None and (most is None or sends_pass(timed, most)):
        return True
    stages = {place: stage for role in site.placements for place, stage in _stages_of(role, round_, site)}
    orders: dict[int, list[_Stage]] = {}
    for rank in {*computes.actions, *site.ranks}:
        order = _order(rank, computes.of(rank), site, stages) if timed is None else _timed_order(rank, timed, stages)
        if order is None:
            return False
        orders[rank] = order
    if _runs_through(orders, most):
        return True
    # One of several tensor ranks may take what the others are not ready for, and so let a send go.
    shared = most is not None and any(len(stage.ranks) > 1 for stage in stages.values())
    return shared and _comes_to_an_end(computes, round_, site, transport)


def _comes_to_an_end(computes: Schedule, round_: Round, site: Site, transport: Transport) -> bool:
    return not simulate(add_communication(computes, round_, site), round_, site, transport=transport).stuck


def runs_in_time(table: Timetable, round_: Round, site: Site) -> bool:
    """Whether the times of all units are an order in which each stands behind what it waits for; then 1, 2 and 3 hold.

    A unit's actions stand together in every list, and the tensor ranks of a stage have one time for each unit.  So what is left
    of 2 is the number of units and that each stage begins them one after the other; and of 3 that a unit begins after the same
    one of the stage before, and a decode micro-step after the last stage's micro-step of the step before.
    """
    counts = {(role, d): count_of((role, d), round_) for role, own in site.placements.items() for d in range(own.dp)}
    if table.site != site or not all(team in table.times for team, count in counts.items() if count.units):
        return False
    for team, times in table.times.items():
        count, starts = counts.get(team), times.starts
        if count is None or starts.shape != (site.placements[team[0]].pp, count.units) or table.count(team) != count:
            return False
        drawn, taken = starts[-1, count.prefills :], starts[:, count.prefills + count.batches :]
        late = (starts[:, 1:] <= starts[:, :-1]).any() or (starts[1:] <= starts[:-1]).any()
        if late or (taken <= drawn[: taken.shape[1]]).any():
            return False
    return True


def _stages_of(role: str, round_: Round, site: Site) -> Iterator[tuple[Place, _Stage]]:
    placement = site.placements[role]
    for replica in range(placement.dp):
        units, prefills, batches = _units(role, replica, round_)
        own: list[_Stage] = []
        for stage in range(placement.pp):
            before = own[-1] if own else None
            own.append(_Stage(placement.stage_ranks(replica, stage), units, before, batches, prefills + batches))
        for stage, each in enumerate(own):
            each.last = own[-1]
            each.after = own[stage + 1] if stage < placement.pp - 1 else None
            each.woken = _woken(placement, replica, stage, decodes=len(units) > prefills)
            yield (role, replica, stage), each


def _units(role: str, replica: int, round_: Round) -> tuple[list[Unit], int, int]:
    """What each stage of a replica has to do, how many prefills that has, and how many decode micro-batches."""
    prefill = round_.prefill.get(role, ())
    prefills = len(prefill[replica]) if replica < len(prefill) else 0
    decodes = role == "actor" and replica < len(round_.decode)
    batches = len(round_.decode[replica]) if decodes else 0
    chunk = round_.index if role == "actor" else round_.index - 1
    units: list[Unit] = [(Op.PREFILL, j, chunk, None) for j in range(prefills)]
    units += [(Op.DECODE, m, chunk, step) for step in range(round_.steps) for m in range(batches)]
    return units, prefills, batches


def _woken(placement: RolePlacement, replica: int, stage: int, decodes: bool) -> tuple[int, ...]:
    """Who may go on when the stage has done something: the next stage, and the one before, whose send may be held; of the last
    one's decoding, all that take tokens."""
    if stage == placement.pp - 1 and decodes:
        return placement.replica_ranks(replica)
    beside = (near for near in (stage - 1, stage + 1) if 0 <= near < placement.pp)
    return tuple(rank for near in beside for rank in placement.stage_ranks(replica, near))


def _timed_order(rank: int, table: Timetable, stages: dict[Place, _Stage]) -> list[_Stage]:
    """The stages whose units the rank does, unit by unit."""
    order, places = table.sequence(rank)
    counts = [table.times[team].starts.shape[1] for team, _ in places]
    own = [stages[role, replica, stage] for (role, replica), stage in places]
    return [own[i] for i in np.repeat(np.arange(len(own)), counts)[order].tolist()]


def _order(rank: int, computes: Sequence[Action], site: Site, stages: dict[Place, _Stage]) -> list[_Stage] | None:
    """The stages whose units the rank does, unit by unit; None where 1 or 2 does not hold."""
    places: dict[str, tuple[_Stage, bool, list[Unit]]] = {}
    for role, placement in site.placements.items():
        coords = placement.coords(rank)
        if coords is not None:
            last = coords.stage == placement.pp - 1
            places[role] = stages[role, coords.replica, coords.stage], last, []
    order: list[_Stage] = []
    follower: Action | None = None
    for action in computes:
        if follower is not None:
            if action != follower:
                return None
            follower = None
            continue
        op, role = action.op, action.role
        if action.rank != rank or role not in places or action.payload is not None or action.peer is not None:
            return None
        stage, last, units = places[role]
        units.append((op, action.micro_batch, action.chunk, action.step))
        order.append(stage)
        if last and (op is Op.DECODE or role != "actor"):
            behind = Op.SAMPLE if op is Op.DECODE else Op.SCORE
            follower = Action(rank, behind, role, action.micro_batch, action.chunk, action.step)
    whole = follower is None and all(units == stage.units for stage, _, units in places.values())
    return order if whole else None


def _runs_through(orders: dict[int, list[_Stage]], most: int | None) -> bool:
    """Whether all units can be done, each rank's in its order, with at most so many hidden states of a link untaken.

    What happens does not depend on who is looked at first.
    """
    position = dict.fromkeys(orders, 0)
    ready = list(orders)
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while position[rank] < len(order):
            stage = order[position[rank]]
            done, before, last = stage.done, stage.before, stage.last
            if before is not None and before.done <= done:
                break
            if done >= stage.first and last is not stage and last.done <= done - stage.micro_batches:
                break
            if _held(order, position[rank], most):
                break
            if len(stage.ranks) > 1:
                if not all(_is_at(stage, orders[member], position[member], most) for member in stage.ranks):
                    break
                ready += stage.ranks
            stage.done = done + 1
            for member in stage.ranks:
                position[member] += 1
            ready += stage.woken
    return all(position[rank] == len(order) for rank, order in orders.items())


def _held(order: list[_Stage], position: int, most: int | None) -> bool:
    """Whether the rank still has to send what the unit before this position has made."""
    if most is None or not position:
        return False
    stage = order[position - 1]
    return stage.after is not None and stage.after.done < stage.done - most


def _is_at(stage: _Stage, order: list[_Stage], position: int, most: int | None) -> bool:
    return position < len(order) and order[position] is stage and not _held(order, position, most)
