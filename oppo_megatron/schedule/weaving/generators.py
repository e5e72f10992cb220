"""Lists of compute actions. Each follows all that it waits for on one timeline, so lists cannot deadlock."""

from __future__ import annotations

import reprlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heapreplace
from typing import Any

import numpy as np
import numpy.typing as npt

from oppo_megatron.columns import Ints
from oppo_megatron.errors import ScheduleError
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.plugins import Plugin
from oppo_megatron.schedule.actions import Action, Op, Schedule, parse_action
from oppo_megatron.schedule.rounds import Batch, Round, Site, sums
from oppo_megatron.schedule.weaving.components import Team, Times, Timetable, count_of
from oppo_megatron.schedule.weaving.costs import Costs

Generator = Callable[[Round, Site, Costs], Schedule]
COMPUTES = (Op.DECODE, Op.SAMPLE, Op.PREFILL, Op.SCORE)


def sequential(round: Round, site: Site, costs: Costs) -> Schedule:
    return _placed(Placer(round, site, costs), actor_first=True, woven=False)


def intra(round: Round, site: Site, costs: Costs) -> Schedule:
    return _placed(Placer(round, site, costs), actor_first=False, woven=False)


def woven(round: Round, site: Site, costs: Costs) -> Schedule:
    """Place the scorers' part in the actor's gaps or after it; one stage has none, so its steps come between prefills."""
    placer = Placer(round, site, costs)
    if site.placements["actor"].pp > 1:
        return _placed(placer, actor_first=True, woven=True)
    placer.place_scorers()
    placer.place_one_stage()
    return placer.schedule()


def _placed(placer: Placer, *, actor_first: bool, woven: bool) -> Schedule:
    parts = placer.place_actor, placer.place_scorers
    for place in parts if actor_first else parts[::-1]:
        place()
        if not woven:
            placer.free.close()
    return placer.schedule()


def one_by_one(round: Round, site: Site, costs: Costs) -> Schedule:
    """List every micro-batch on all stages before the next of its role, so that no transport deadlocks."""
    times, begun = dict[Team, Times](), 0
    for role in [*(role for role in site.placements if role != "actor"), "actor"]:
        placement = site.placements[role]
        for replica in range(placement.dp):
            units = count_of((role, replica), round).units
            places = begun + np.arange(units) * placement.pp + np.arange(placement.pp)[:, None]
            times[role, replica] = Times(places, places)
            begun += places.size
    return Schedule(Timetable(round, site, times))


GENERATORS: Mapping[str, Generator] = {"sequential": sequential, "intra": intra, "woven": woven}


@dataclass(frozen=True)
class CustomGenerator:
    plugin: Plugin

    def __call__(self, round: Round, site: Site, costs: Costs) -> Schedule:
        """Raises PluginError if the result is not a Schedule or differs between calls."""
        made, again = self._lists(round, site, costs), self._lists(round, site, costs)
        if made != again:
            raise self.plugin.refuse("returned two schedules for the same round", "make it deterministic: every rank calls it")
        return Schedule(made)

    def _lists(self, round: Round, site: Site, costs: Costs) -> dict[int, tuple[Action, ...]]:
        made, remedy = self.plugin(round, site, costs), "return a Schedule: the actions of each rank, in order"
        if not isinstance(made, Schedule):
            raise self.plugin.refuse(f"returned {type(made).__name__}", remedy)
        actions: Any = made.actions
        if not isinstance(actions, Mapping) or not all(isinstance(own, (tuple, list)) for own in actions.values()):
            raise self.plugin.refuse(f"returned a Schedule of {reprlib.repr(actions)}", "make it of a dict: rank to actions")
        if strange := [rank for rank in actions if rank not in site.ranks]:
            raise self.plugin.refuse(f"returned actions of {strange[0]!r:.40}", "give actions to the ranks of `site.ranks` only")
        for rank, action in ((rank, action) for rank, own in actions.items() for action in own):
            if not _computes(action):
                fault = f"gave rank {rank} {action!r:.120}"
                raise self.plugin.refuse(fault, "give it actions that compute, as the built-in generators make them")
        return {rank: tuple(own) for rank, own in actions.items()}


def _computes(action: Any) -> bool:
    """True if it is an action that computes, and its fields have the types that its text gives."""
    if not isinstance(action, Action) or action.op not in COMPUTES or not isinstance(action.rank, int):
        return False
    try:
        return parse_action(action.rank, str(action)) == action
    except (TypeError, ScheduleError):
        return False


def generator_of(chosen: str) -> Generator:
    """Raises ConfigError if a user's generator cannot be loaded."""
    return GENERATORS.get(chosen) or CustomGenerator(Plugin.load("overlap.schedule", chosen))


def _of_replica(replicas: Sequence[Sequence[Batch]], replica: int) -> Sequence[Batch]:
    return replicas[replica] if replica < len(replicas) else ()


def _step_starts(durations: list[list[int]], free: list[int], message: int, steps: int) -> Ints:
    """Starts of decode steps, [steps, micro-batches, stages]; `free`: when each stage may begin."""
    ready, starts, apart = [0] * len(durations), list[list[list[int]]](), 0
    through = message if len(free) > 1 else 0
    while len(starts) < steps:
        # Micro-batches move together, to leave one gap per stage.
        early = _earliest(durations, ready, free, message)
        then_ready = [row[-1] + own[-1] + message for row, own in zip(early, durations, strict=True)]
        then_free = [start + duration for start, duration in zip(early[-1], durations[-1], strict=True)]
        following = _close(_earliest(durations, then_ready, then_free, message), durations, message)
        step = _close(early, durations, message, [row[0] for row in following])
        starts.append(step)
        before = *ready, *free
        ready = [row[-1] + own[-1] + through for row, own in zip(step, durations, strict=True)]
        free = [start + duration for start, duration in zip(step[-1], durations[-1], strict=True)]
        shifts = {after - earlier for after, earlier in zip((*ready, *free), before, strict=True)}
        if len(shifts) == 1:
            apart = shifts.pop()
            break
    found = np.array(starts, dtype=np.int64)
    later = apart * np.arange(1, steps - len(starts) + 1, dtype=np.int64)
    return np.concatenate([found, found[-1] + later[:, None, None]])


def _earliest(durations: list[list[int]], ready: list[int], free: list[int], message: int) -> list[list[int]]:
    free, starts = list(free), []
    for own, arrival in zip(durations, ready, strict=True):
        row = []
        for stage, duration in enumerate(own):
            start = max(arrival, free[stage])
            row.append(start)
            free[stage] = start + duration
            arrival = start + duration + message
        starts.append(row)
    return starts


def _close(starts: list[list[int]], durations: list[list[int]], message: int, needed: list[int] | None = None) -> list[list[int]]:
    """Move all but the last as late as the next one, and the following step (`needed`), allow."""
    starts = [list(row) for row in starts]
    for m in range(len(starts) - 2, -1, -1):
        arrival = starts[m + 1][-1] + message
        if needed is not None:
            arrival = min(arrival, needed[m])
        for stage in range(len(durations[m]) - 1, -1, -1):
            arrival = min(starts[m + 1][stage], arrival - message) - durations[m][stage]
            starts[m][stage] = arrival
    return starts


class Line:
    """`times` [prefills, stages]; `ends`, `starts` and `placed` by stage."""

    def __init__(self, placement: RolePlacement, replica: int, times: Ints):
        self.ranks = [placement.stage_ranks(replica, stage) for stage in range(placement.pp)]
        self.times = times
        self.ends = [0] * placement.pp
        self.starts: list[list[int]] = [[] for _ in self.ranks]
        self.placed: list[list[int]] = [[] for _ in self.ranks]
        self.decoded: Times | None = None

    def whole(self) -> Times:
        prefilled = Times(np.array(self.starts, dtype=np.int64), np.array(self.placed, dtype=np.int64))
        if self.decoded is None:
            return prefilled
        return Times(*(np.concatenate(both, axis=1) for both in zip(prefilled, self.decoded, strict=True)))


class Placer:
    def __init__(self, round: Round, site: Site, costs: Costs):
        self.round, self.site, self.costs = round, site, costs
        self.message = nanoseconds(costs.message_s)
        self._lines: dict[Team, Line] = {}
        shortest = []
        for role, replicas in {"actor": (), **round.prefill}.items():
            placement = site.placements[role]
            for replica in range(placement.dp if role == "actor" else len(replicas)):
                quickest, times = self._prefill_times(role, _of_replica(replicas, replica))
                shortest += [] if quickest is None else [quickest]
                self._lines[role, replica] = Line(placement, replica, times)
        self.free = Gaps(site.ranks, min(shortest, default=1))
        self._num_placed = 0

    def place_actor(self) -> None:
        for replica in range(self.site.placements["actor"].dp):
            line = self._lines["actor", replica]
            for times in line.times.tolist():
                self._place_prefill(line, times)
            self._place_decode(line, _of_replica(self.round.decode, replica))

    def place_scorers(self) -> None:
        """Place each time the line whose first stage is free first."""
        roles = [role for role in self.site.placements if role != "actor" and role in self.round.prefill]
        teams = sorted((roles.index(role), replica, role) for role, replica in self._lines if role in roles)
        lines = [self._lines[role, replica] for _, replica, role in teams]
        times = [line.times.tolist() for line in lines]
        turns = [(0, n, 0) for n, own in enumerate(times) if own]
        while turns:
            _, n, j = turns[0]
            done = self._place_prefill(lines[n], times[n][j])
            if j + 1 < len(times[n]):
                heapreplace(turns, (done, n, j + 1))
            else:
                heappop(turns)

    def schedule(self) -> Schedule:
        return Schedule(Timetable(self.round, self.site, {team: line.whole() for team, line in self._lines.items()}))

    def _place_decode(self, line: Line, batches: Sequence[Batch]) -> None:
        if not (batches and self.round.steps):
            return
        stages, steps = range(len(line.ranks)), self.round.steps
        seconds = [[self.costs.decode_at(stage)(len(batch)) for stage in stages] for batch in batches]
        for own, batch in zip(seconds, batches, strict=True):
            own[-1] += self.costs.sample(len(batch))
        durations = [list(map(nanoseconds, own)) for own in seconds]
        free = [self.free.end(ranks) for ranks in line.ranks]
        starts = _step_starts(durations, free, self.message, steps)
        ends = starts + np.array(durations, dtype=np.int64)
        for stage, ranks in enumerate(line.ranks):
            # Everything on these ranks, which hold no other actor replica, ends before the step.
            self.free.append(ranks, starts[:, :, stage].ravel(), ends[:, :, stage].ravel())
        placed = np.arange(self._num_placed, self._num_placed + starts.size).reshape(-1, len(stages))
        self._num_placed += starts.size
        line.decoded = Times(starts.reshape(-1, len(stages)).T, placed.T)

    def place_one_stage(self) -> None:
        """Place the actor among the scorers: prompts and a step before all, later steps evenly over its ranks' prefills.

        Only the order counts: a device then computes both at a time, if the host has started decode steps before each prefill.
        """
        for replica in range(self.site.placements["actor"].dp):
            line, (prefills, batches, steps, _) = self._lines["actor", replica], count_of(("actor", replica), self.round)
            unit_U = np.arange(prefills + batches * steps)
            step_U = np.maximum(0, unit_U - prefills) // max(1, batches)
            evenly_U = step_U * self.free.end(line.ranks[0]) // max(1, steps)
            line.starts = [(np.where(step_U > 0, evenly_U, -len(unit_U)) + unit_U).tolist()]
            line.placed = [(self._num_placed + unit_U).tolist()]

    def _place_prefill(self, line: Line, times: list[int]) -> int:
        """Place a prefill on all stages. Returns when the first is done."""
        ends, ready = line.ends, 0
        for stage, (ranks, duration) in enumerate(zip(line.ranks, times, strict=True)):
            start = self.free.place(ranks, max(ready, ends[stage]), duration)
            ends[stage] = start + duration
            line.starts[stage].append(start)
            line.placed[stage].append(self._num_placed + stage)
            ready = start + duration + self.message
        self._num_placed += len(times)
        return ends[0]

    def _prefill_times(self, role: str, batches: Sequence[Batch]) -> tuple[int | None, Ints]:
        """Shortest time on any stage without scoring, and all times, [n, stages]."""
        if not batches:
            return None, np.zeros((0, self.site.placements[role].pp), dtype=np.int64)
        tokens, rows = sums(batches)
        lines = [self.costs.prefill_at(role, stage) for stage in range(self.site.placements[role].pp)]
        fixed_s, per_token_s = np.array([(line.fixed_s, line.per_token_s) for line in lines]).T
        seconds = fixed_s + tokens[:, None] * per_token_s
        quickest = int(in_nanoseconds(seconds.min(keepdims=True)).item())
        if role != "actor":
            seconds[:, -1] += self.costs.score.fixed_s + rows * self.costs.score.per_token_s
        return quickest, in_nanoseconds(seconds)


FOREVER = 1 << 62


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def in_nanoseconds(seconds: npt.NDArray[np.float64]) -> Ints:
    return np.rint(seconds * 1e9).astype(np.int64)


class Gaps:
    """Gaps of each rank, the last endless, none shorter than `shortest`."""

    def __init__(self, ranks: Sequence[int], shortest: int = 1):
        self._shortest = max(1, shortest)
        self._starts: dict[int, list[int]] = {rank: [0] for rank in ranks}
        self._ends: dict[int, list[int]] = {rank: [FOREVER] for rank in ranks}

    def place(self, ranks: Sequence[int], ready: int, duration: int) -> int:
        """Occupy all `ranks` at the earliest common time from `ready`. Returns the start."""
        start = self._fit(ranks[0], ready, duration)
        while len(ranks) > 1 and (later := max(self._fit(rank, start, duration) for rank in ranks)) > start:
            start = later
        for rank in ranks:
            self._take(rank, start, start + duration)
        return start

    def append(self, ranks: Sequence[int], starts: Ints, ends: Ints) -> None:
        for rank in ranks:
            begins = np.concatenate([self._starts[rank][-1:], ends[:-1]])
            assert (begins <= starts).all(), f"rank {rank} is busy somewhere in {starts[0]} .. {ends[-1]}"
            left = starts - begins >= self._shortest
            self._starts[rank][-1:] = [*begins[left].tolist(), int(ends[-1])]
            self._ends[rank][-1:] = [*starts[left].tolist(), FOREVER]

    def end(self, ranks: Sequence[int]) -> int:
        return max(self._starts[rank][-1] for rank in ranks)

    def close(self) -> None:
        for rank in self._starts:
            del self._starts[rank][:-1], self._ends[rank][:-1]

    def _fit(self, rank: int, ready: int, duration: int) -> int:
        starts, ends = self._starts[rank], self._ends[rank]
        gap = bisect_left(ends, ready + duration)
        while max(ready, starts[gap]) + duration > ends[gap]:
            gap += 1
        return max(ready, starts[gap])

    def _take(self, rank: int, start: int, end: int) -> None:
        starts, ends = self._starts[rank], self._ends[rank]
        gap = bisect_right(starts, start) - 1
        first, last = starts[gap], ends[gap]
        assert first <= start and end <= last, f"rank {rank} is busy somewhere in {start} .. {end}"
        left = [(a, b) for a, b in ((first, start), (end, last)) if b - a >= self._shortest]
        starts[gap : gap + 1] = [a for a, _ in left]
        ends[gap : gap + 1] = [b for _, b in left]
