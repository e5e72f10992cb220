"""Prove from start times that a timetable is sound once its messages are added.

Each stage has exactly the required units in the permitted order, each after all that it waits for. Receives come directly before
a unit, sends directly after, so no ranks wait in a cycle. If sends may be held, units are run in each rank's order: exact for
stages of single ranks, else a simulation decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from oppo_megatron.schedule.actions import Payload, Schedule
from oppo_megatron.schedule.checking.caches import Budgets
from oppo_megatron.schedule.checking.checker import check, require_sound
from oppo_megatron.schedule.checking.timeline import simulate
from oppo_megatron.schedule.links import GLOO, Transport
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.components import Timetable, add_communication, count_of
from oppo_megatron.schedule.weaving.costs import Costs

Place = tuple[str, int, int]
"""(role, replica, stage)"""


@dataclass
class _Stage:
    """Unit n waits for n + 1 units of `before`; from the second decode step (`first`) on also for n + 1 - `micro_batches` of
    `last`.
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
    """Raise ScheduleError with all faults of compute actions that cannot be proved."""
    if not prove(computes, round_, site, transport):
        require_sound(add_communication(computes, round_, site), round_, site, budgets, costs, transport)


def prove(computes: Schedule, round_: Round, site: Site, transport: Transport = GLOO) -> bool:
    """True if sound with messages, apart from caches."""
    table = computes.actions
    if not (isinstance(table, Timetable) and runs_in_time(table, round_, site)):
        return not check(add_communication(computes, round_, site), round_, site, {}, transport=transport)
    if not transport.holds:
        return True
    if transport.made and set(transport.in_flight) == {Payload.HIDDEN}:
        stages = {place: stage for role in site.placements for place, stage in _stages_of(role, round_, site)}
        orders = {rank: _order(rank, table, stages) for rank in site.ranks}
        if _runs_through(orders, transport.in_flight[Payload.HIDDEN]):
            return True
        # One of several tensor ranks may receive before the others, and so release a send.
        if all(len(stage.ranks) == 1 for stage in stages.values()):
            return False
    return not simulate(add_communication(computes, round_, site), round_, site, transport=transport).stuck


def runs_in_time(table: Timetable, round_: Round, site: Site) -> bool:
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
        count = count_of((role, replica), round_)
        batches, begun = count.batches, count.prefills + count.batches
        own: list[_Stage] = []
        for stage in range(placement.pp):
            before = own[-1] if own else None
            own.append(_Stage(placement.stage_ranks(replica, stage), before, batches, begun))
        for stage, each in enumerate(own):
            each.last = own[-1]
            each.after = own[stage + 1] if stage < placement.pp - 1 else None
            near = [other for other in (stage - 1, stage + 1) if 0 <= other < placement.pp]
            each.woken = tuple(rank for other in near for rank in placement.stage_ranks(replica, other))
            if stage == placement.pp - 1 and batches:  # tokens go to all stages
                each.woken = placement.replica_ranks(replica)
            yield (role, replica, stage), each


def _order(rank: int, table: Timetable, stages: dict[Place, _Stage]) -> list[_Stage]:
    order, places = table.sequence(rank)
    counts = [table.times[team].starts.shape[1] for team, _ in places]
    own = [stages[role, replica, stage] for (role, replica), stage in places]
    return [own[i] for i in np.repeat(np.arange(len(own)), counts)[order].tolist()]


def _runs_through(orders: dict[int, list[_Stage]], most: int) -> bool:
    """True if all units can be done; `most`: unreceived messages per link."""
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
    if not position:
        return False
    stage = order[position - 1]
    return stage.after is not None and stage.after.done < stage.done - most


def _is_at(stage: _Stage, order: list[_Stage], position: int, most: int) -> bool:
    return position < len(order) and order[position] is stage and not _held(order, position, most)
