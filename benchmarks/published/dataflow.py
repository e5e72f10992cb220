"""Calls on meshes of devices in virtual time: Algorithm 1 of ReaL (MLSys 2025), by clocks of devices.

    StartTime(v) = max(ReadyTime(v), the clocks of v's mesh);   EndTime(v) = StartTime(v) + TimeCost(v)
    ReadyTime(v) = max over v's parents of EndTime

The next call is always the ready one with the least (ReadyTime, place in the list): the list's order decides ties, and is part
of a plan.  The paper keeps the last call of every mesh that the new one overlaps; the largest clock in a mesh is the end of that
call, so both give the same times.  Times are whole nanoseconds: nothing depends on the order of sums or of sets.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from oppo_megatron.errors import ScheduleError

SECOND = 1_000_000_000
"""Nanoseconds."""
MOST_ITERATIONS = 64


def nanoseconds(seconds: float) -> int:
    return round(seconds * SECOND)


@dataclass(frozen=True)
class Call:
    """A call that keeps all `devices` busy for `duration_ns`, once the calls named in `parents` have ended."""

    name: str
    devices: frozenset[int]
    duration_ns: int
    parents: tuple[str, ...] = ()


@dataclass(frozen=True)
class Span:
    """When a call runs, in nanoseconds from the beginning."""

    start_ns: int
    end_ns: int


Spans = Mapping[str, Span]


def play(calls: Sequence[Call]) -> dict[str, Span]:
    """Return the span of each call, by start.  Raises ScheduleError if some call can never start."""
    _require_known(calls)
    waiting = {call.name: len(set(call.parents)) for call in calls}
    children: dict[str, list[int]] = {call.name: [] for call in calls}
    for number, call in enumerate(calls):
        for parent in set(call.parents):
            children[parent].append(number)
    queue = [(0, number) for number, call in enumerate(calls) if not call.parents]
    clocks: dict[int, int] = {}
    spans: dict[str, Span] = {}
    while queue:
        ready, number = heapq.heappop(queue)
        call = calls[number]
        start = max(ready, *(clocks.get(device, 0) for device in call.devices))
        end = start + call.duration_ns
        clocks.update(dict.fromkeys(call.devices, end))
        spans[call.name] = Span(start, end)
        for child in children[call.name]:
            waiting[calls[child].name] -= 1
            if waiting[calls[child].name] == 0:
                ready_ns = max(spans[parent].end_ns for parent in calls[child].parents)
                heapq.heappush(queue, (ready_ns, child))
    if len(spans) < len(calls):
        stuck = [call.name for call in calls if call.name not in spans]
        raise ScheduleError(f"{', '.join(stuck)} wait for each other in a circle; take one of the parents out")
    return spans


def makespan_ns(spans: Spans) -> int:
    return max((span.end_ns for span in spans.values()), default=0)


def check(calls: Sequence[Call], spans: Spans) -> None:
    """Raise ScheduleError if a call begins before its parents end, or a device would run two calls at once."""
    for call in calls:
        for parent in call.parents:
            if spans[call.name].start_ns < spans[parent].end_ns:
                raise ScheduleError(
                    f"{call.name} begins at {_shown(spans[call.name].start_ns)}, before {parent}, which it waits for, ends at "
                    f"{_shown(spans[parent].end_ns)}; begin it then"
                )
    last: dict[int, Call] = {}
    for call in sorted((c for c in calls if c.duration_ns), key=lambda c: spans[c.name].start_ns):
        for device in sorted(call.devices):
            before = last.get(device)
            if before is not None and spans[call.name].start_ns < spans[before.name].end_ns:
                raise ScheduleError(
                    f"{call.name} begins on device {device} at {_shown(spans[call.name].start_ns)}, while {before.name} runs "
                    f"there until {_shown(spans[before.name].end_ns)}; begin it then"
                )
            last[device] = call


@dataclass(frozen=True)
class Carried:
    """Between iterations: `call` waits for `parent` of the iteration before."""

    call: str
    parent: str


def iterations(calls: Sequence[Call], carried: Iterable[Carried], count: int) -> list[Call]:
    """The calls of `count` iterations, named `name#i`."""
    waits: dict[str, list[str]] = {}
    for edge in carried:
        waits.setdefault(edge.call, []).append(edge.parent)
    return [
        replace(
            call,
            name=f"{call.name}#{i}",
            parents=tuple(
                [f"{parent}#{i}" for parent in call.parents]
                + [f"{parent}#{i - 1}" for parent in waits.get(call.name, ()) if i > 0]
            ),
        )
        for i in range(count)
        for call in calls
    ]


def period_ns(calls: Sequence[Call], carried: Sequence[Carried]) -> int:
    """Nanoseconds that one more iteration takes, once they have become constant: three times the same in a row.

    Raises ScheduleError if they have not after 64 iterations.
    """
    for count in (8, 16, 32, MOST_ITERATIONS):
        spans = play(iterations(calls, carried, count))
        ends = [max(spans[f"{call.name}#{i}"].end_ns for call in calls) for i in range(count)]
        steps = [after - before for before, after in zip(ends, ends[1:], strict=False)]
        if len(set(steps[-3:])) == 1:
            return steps[-1]
    raise ScheduleError(
        f"after {MOST_ITERATIONS} iterations one takes as long as the next in no three of them; let fewer calls overlap"
    )


def _shown(nanosecs: int) -> str:
    return f"{nanosecs / SECOND:.1f} s"


def _require_known(calls: Sequence[Call]) -> None:
    names = [call.name for call in calls]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ScheduleError(f"{', '.join(twice)}: several calls have this name; give each its own")
    known = set(names)
    for call in calls:
        if not call.devices:
            raise ScheduleError(f"{call.name} has no device; name at least one")
        if call.duration_ns < 0:
            raise ScheduleError(f"{call.name} lasts {call.duration_ns} ns; give 0 or more")
        if unknown := [parent for parent in call.parents if parent not in known]:
            raise ScheduleError(f"{call.name} waits for {', '.join(unknown)}, which is not a call; name one of the calls")
