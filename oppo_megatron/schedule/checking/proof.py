"""A quick proof that a generator's timetable is a sound schedule once its messages are added.

It needs only the start times of *units* (a decode with its sample, a prefill with its score).  If `prove` succeeds, `check`
finds nothing but caches that overrun, which `require_room` checks in every round.  Lists without a timetable are checked in full.

A timetable keeps the actions of a unit together and gives all tensor ranks of a stage the same times.  `runs_in_time` shows
the rest:

1. Each stage has exactly the units that the round requires, in the only permitted order: the actor's prefills by micro-batch,
   then its decode micro-steps by step and micro-batch; a scorer's prefills by micro-batch.
2. A unit starts after the same unit of the previous stage, and a decode micro-step after the last stage's micro-step of the
   previous step.

`add_communication` puts the receives of a unit directly before it and its sends directly after it.  The tokens of the last step
and the messages that spread the chunk end the list.  Therefore:

- No action is missing, doubled or foreign, and each message has both ends.
- The messages of a link are sent and received in the order of its stages' units, which is the same at both ends.
- A hidden state is used by the unit directly after its receive, tokens arrive before the step that continues them, and a chunk
  follows all its tokens.
- In the order of starts each unit follows everything that it waits for, so no ranks wait in a cycle.  After the units there are
  only receives of tokens that have been drawn, a gather that all its ranks reach, and chunks, which a rank receives from one
  before it in the order of `Site.feeds`.
- Each link has its own communicator, used in one order from the stream of one role, as transports require.

A transport may also hold a send until earlier messages of its link have been received.  `sends_pass` proves from the times that
held hidden states cannot deadlock.  If it cannot, the units are run in each rank's order, without times and messages, which is
exact if stages have single ranks; otherwise a simulation decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Payload, Schedule
from oppo_megatron.schedule.checking.caches import Budgets
from oppo_megatron.schedule.checking.checker import check, require_sound
from oppo_megatron.schedule.checking.timeline import simulate
from oppo_megatron.schedule.checking.transport import GLOO, Transport
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.communication import add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.timetable import Team, Timetable, count_of

SWEEPS = 8
"""Sweeps of `sends_pass`.  Schedules that complete have needed no more; those with a cycle never converge."""

Place = tuple[str, int, int]
"""(role, replica, stage)"""


@dataclass
class _Stage:
    """One pipeline stage: the number of its units, how many are done, and the stages that it waits for.

    Unit n waits for n + 1 units of the stage before, and from the second decode step (unit `first`) on for
    n + 1 - `micro_batches` units of the last stage.  If sends may be held, a rank waits after unit n until the stage after has
    done n + 1 - (the unreceived messages that its link may have).
    """

    ranks: tuple[int, ...]
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
    """Raise ScheduleError with all faults of the compute actions, unless they are proved sound over the transport.

    Caches are assumed to hold the round (`require_room`).
    """
    if not prove(computes, round_, site, transport):
        require_sound(add_communication(computes, round_, site), round_, site, budgets, costs, transport)


def prove(computes: Schedule, round_: Round, site: Site, transport: Transport = GLOO) -> bool:
    """True if the compute actions and their messages are a sound schedule over the transport."""
    table = computes.actions
    if not (isinstance(table, Timetable) and runs_in_time(table, round_, site)):
        return not check(add_communication(computes, round_, site), round_, site, {}, transport=transport)
    if not transport.holds:
        return True
    if transport.made and set(transport.in_flight) == {Payload.HIDDEN}:
        most = transport.in_flight[Payload.HIDDEN]
        if sends_pass(table, most):
            return True
        stages = {place: stage for role in site.placements for place, stage in _stages_of(role, round_, site)}
        if _runs_through({rank: _order(rank, table, stages) for rank in site.ranks}, most):
            return True
        # One of several tensor ranks may receive before the others are ready, and so release a send.
        if all(len(stage.ranks) == 1 for stage in stages.values()):
            return False
    return not simulate(add_communication(computes, round_, site), round_, site, transport=transport).stuck


def runs_in_time(table: Timetable, round_: Round, site: Site) -> bool:
    """True if they are the units of the round and each starts after everything that it waits for (1 and 2 above)."""
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


def sends_pass(table: Timetable, most: int) -> bool:
    """True if no rank waits forever when `most` hidden states of a link may be unreceived; False proves nothing.

    The timetable must run in time.  A rank that sends one hidden state more waits until the next stage receives the first of
    them, at the start of the unit `most` before.  So what the rank does next must also follow that unit.  Most such waits agree
    with the order of starts.  If one does not, the waiting unit is moved to directly after what it waits for, and those that wait
    for it likewise, until nothing moves (the order then satisfies all waits) or `SWEEPS` have passed.
    """
    assert most >= 1, "a link needs room for at least 1 message in flight"
    ends = np.cumsum([times.starts.size for times in table.times.values()])
    numbers = {
        team: np.arange(end - times.starts.size, end).reshape(times.starts.shape)
        for (team, times), end in zip(table.times.items(), ends, strict=True)
    }
    if not numbers:
        return True
    starts, placed = (np.concatenate([times[i].ravel() for times in table.times.values()]) for i in range(2))
    rank_of = np.empty_like(starts)
    rank_of[np.lexsort((placed, starts))] = np.arange(len(starts)) * len(starts)  # leaves room for as many in between
    first, then = (np.concatenate(pair) for pair in zip(*_waits(table, numbers, most), strict=True))
    for _ in range(SWEEPS):
        late = rank_of[then] <= rank_of[first]
        if not late.any():
            return True
        np.maximum.at(rank_of, then[late], rank_of[first[late]] + 1)
    return False


def _waits(table: Timetable, numbers: dict[Team, Ints], most: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield pairs of unit numbers: the second waits for the first.  `numbers` are [stages, units] by replica."""
    releases = np.full(sum(own.size for own in numbers.values()), -1)
    for team, own in numbers.items():
        count = table.count(team)
        yield own[:-1].ravel(), own[1:].ravel()
        yield own[-1, count.prefills : own.shape[1] - count.batches], own[0, count.prefills + count.batches :]
        releases[own[:-1, most:]] = own[1:, : max(0, own.shape[1] - most)]
    for rank in table.site.ranks:
        order, stages = table.sequence(rank)
        if stages:
            units = np.concatenate([numbers[team][stage] for team, stage in stages])[order]
            yield units[:-1], units[1:]
            released = releases[units[:-1]]
            yield released[released >= 0], units[1:][released >= 0]


def _stages_of(role: str, round_: Round, site: Site) -> Iterator[tuple[Place, _Stage]]:
    placement = site.placements[role]
    for replica in range(placement.dp):
        count = count_of((role, replica), round_)
        batches, begun = count.batches, count.prefills + count.batches
        own: list[_Stage] = []
        for stage in range(placement.pp):
            before = own[-1] if own else None
            own.append(_Stage(placement.stage_ranks(replica, stage), before, batches, begun))
        for stage, each in enumerate(own):
            each.last = own[-1]
            each.after = own[stage + 1] if stage < placement.pp - 1 else None
            each.woken = _woken(placement, replica, stage, decodes=batches > 0)
            yield (role, replica, stage), each


def _woken(placement: RolePlacement, replica: int, stage: int, decodes: bool) -> tuple[int, ...]:
    """Return the ranks that may continue after the stage has done a unit.

    They are of the next stage and the one before, whose send may be held; if the last stage decodes, all that receive tokens.
    """
    if stage == placement.pp - 1 and decodes:
        return placement.replica_ranks(replica)
    neighbours = (near for near in (stage - 1, stage + 1) if 0 <= near < placement.pp)
    return tuple(rank for near in neighbours for rank in placement.stage_ranks(replica, near))


def _order(rank: int, table: Timetable, stages: dict[Place, _Stage]) -> list[_Stage]:
    """Return the stage of each of the rank's units, in order."""
    order, places = table.sequence(rank)
    counts = [table.times[team].starts.shape[1] for team, _ in places]
    own = [stages[role, replica, stage] for (role, replica), stage in places]
    return [own[i] for i in np.repeat(np.arange(len(own)), counts)[order].tolist()]


def _runs_through(orders: dict[int, list[_Stage]], most: int) -> bool:
    """True if all units can be done in each rank's order, with at most `most` unreceived hidden states of a link.

    The order of examining ranks does not change the result.
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


def _held(order: list[_Stage], position: int, most: int) -> bool:
    """True if the rank still has to send the result of the unit before this position."""
    if not position:
        return False
    stage = order[position - 1]
    return stage.after is not None and stage.after.done < stage.done - most


def _is_at(stage: _Stage, order: list[_Stage], position: int, most: int) -> bool:
    return position < len(order) and order[position] is stage and not _held(order, position, most)
