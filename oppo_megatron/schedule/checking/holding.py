"""A quick proof that sends which a transport may hold are in nobody's way, from the times of units alone.

Such a transport (`Transport.in_flight`) lets n hidden states of a link go untaken: a rank that sends one more waits until the
next stage has taken the first of them, and does nothing else meanwhile.  `runs_in_time` has shown that all units can be done if
sends do not wait.  They are in nobody's way if one of two things holds.

*None waits.*  Let a unit take what it receives when it begins.  What it sends it may send at any time from then on, as long as
that is before the rank's next unit begins and before the next stage begins the unit.  It can do so when the next stage has begun
the n-th unit before it, if that is before the rank's next unit begins: before the next stage begins this unit it always is.
Sorted by these times, at equal times units first, everything stands behind what it waits for.

*All ranks have one order.*  Let all have a stage of each replica, and their units in the same order.  Take the first unit in
that order that not all stages have done, and the first stage that has not.  The stage before has sent it, what it continues
stands before it in the order, and so do the messages that could hold its own send: they have been taken.  So it can be done.
"""

from __future__ import annotations

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.schedule.actions import Payload
from oppo_megatron.schedule.checking.transport import Transport
from oppo_megatron.schedule.weaving.timetable import Team, Timetable


def sends_pass(table: Timetable, transport: Transport) -> bool:
    """Whether one of both holds for a timetable that runs in time.  False proves nothing."""
    if not transport.made or set(transport.in_flight) - {Payload.HIDDEN}:
        return False
    most = transport.in_flight.get(Payload.HIDDEN)
    return most is None or none_waits(table, most) or in_one_order(table)


def none_waits(table: Timetable, most: int) -> bool:
    """The first of them, for `most` hidden states of a link."""
    assert most >= 1, "a link of which nothing may be on its way lets nothing through"
    then = {team: np.full_like(times.starts, np.iinfo(np.int64).max) for team, times in table.times.items()}
    for rank in table.site.ranks:
        order, own = table.sequence(rank)
        starts = np.concatenate([table.times[team].starts[stage] for team, stage in own]) if own else np.zeros(0, dtype=np.int64)
        after = np.full_like(starts, np.iinfo(np.int64).max)
        after[order[:-1]] = starts[order[1:]]
        ends = np.cumsum([table.times[team].starts.shape[1] for team, _ in own])
        for (team, stage), each in zip(own, np.split(after, ends[:-1]) if own else (), strict=True):
            np.minimum(then[team][stage], each, out=then[team][stage])
    taken = ((times.starts[1:, :-most], then[team][:-1, most:]) for team, times in table.times.items())
    return all(bool((begun < goes_on).all()) for begun, goes_on in taken)


def in_one_order(table: Timetable) -> bool:
    """The second of them."""
    first: tuple[Ints, list[Team]] | None = None
    for rank in table.site.ranks:
        order, own = table.sequence(rank)
        found = order, [team for team, _ in own]
        if first is None:
            first = found
        if found[1] != first[1] or not np.array_equal(order, first[0]):
            return False
    return True
