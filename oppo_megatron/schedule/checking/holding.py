"""A quick proof that sends which a transport may hold are in nobody's way, from the times of units alone.

Such a transport (`Transport.in_flight`) lets n hidden states of a link go untaken: a rank that sends one more waits until the
next stage has taken the first of them, and does nothing else meanwhile.  Let a unit take what it receives when it begins.  Then
what a rank does next begins after that n-th unit before of the next stage, beside all that it waits for in any case.

The times that a generator gave are an order in which each unit stands behind what it waits for, where no send is held
(`runs_in_time`).  Most held sends fit into it.  Where one does not, what waits for it is put off until just behind it, and so on
with what waits for that.  Once nothing is left to put off, the order holds for all; where that goes on, units may wait in a
circle, and it proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.schedule.weaving.timetable import Team, Timetable

SWEEPS = 8
"""What goes through takes no more, as far as has been seen; in a circle there is no end to them."""


def sends_pass(table: Timetable, most: int) -> bool:
    """Whether all goes through with `most` hidden states of a link, for a timetable that runs in time.  False proves nothing."""
    assert most >= 1, "a link of which nothing may be on its way lets nothing through"
    numbers = _numbers(table)
    if not numbers:
        return True
    starts, placed = (np.concatenate([times[i].ravel() for times in table.times.values()]) for i in range(2))
    place = np.empty_like(starts)
    place[np.lexsort((placed, starts))] = np.arange(len(starts)) * len(starts)  # as many fit between two of them
    first, then = (np.concatenate(ends) for ends in zip(*_waits(table, numbers, most), strict=True))
    for _ in range(SWEEPS):
        late = place[then] <= place[first]
        if not late.any():
            return True
        np.maximum.at(place, then[late], place[first[late]] + 1)
    return False


def _numbers(table: Timetable) -> dict[Team, Ints]:
    """Units of all replicas counted through, [stages, units]."""
    sizes = [times.starts.size for times in table.times.values()]
    ends = np.cumsum(sizes)
    return {
        team: np.arange(end - size, end).reshape(times.starts.shape)
        for (team, times), end, size in zip(table.times.items(), ends, sizes, strict=True)
    }


def _waits(table: Timetable, numbers: dict[Team, Ints], most: int) -> Iterator[tuple[Ints, Ints]]:
    """Pairs of units of which the second waits for the first."""
    releases = np.full(sum(own.size for own in numbers.values()), -1)
    for team, own in numbers.items():
        count = table.count(team)
        begun = count.prefills + count.batches
        yield own[:-1].ravel(), own[1:].ravel()
        yield own[-1, count.prefills : own.shape[1] - count.batches], own[0, begun:]
        releases[own[:-1, most:]] = own[1:, : max(0, own.shape[1] - most)]
    for rank in table.site.ranks:
        order, stages = table.sequence(rank)
        if stages:
            units = np.concatenate([numbers[team][stage] for team, stage in stages])[order]
            yield units[:-1], units[1:]
            released = releases[units[:-1]]
            yield released[released >= 0], units[1:][released >= 0]
