"""Generators: they turn the work of a round into an ordered list of actions for every rank.  Compute actions only.

All of them lay the actions out on one virtual timeline, by the cost model; a rank's list is its part of that timeline,
in order of start.  A list order that comes from one timeline cannot deadlock, however the roles' ranks overlap: the
actions of all ranks, sorted by start, are an order in which everything an action waits for stands before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from operator import itemgetter

from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Schedule
from oppo_megatron.schedule.rounds import Batch, Round, Site
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.gaps import Gaps, nanoseconds

Generator = Callable[[Round, Site, Costs], Schedule]

Stage = tuple[str, int, int]
"""(role, replica, pipeline stage)"""

What = tuple[int, int, int | None]
"""(micro-batch, chunk, decode step)"""


def sequential(round: Round, site: Site, costs: Costs) -> Schedule:
    """The actor's part first on each rank, then the scorers'."""
    layout = _Layout(round, site, costs)
    layout.place_actor()
    layout.free.close()
    layout.place_scorers()
    return layout.schedule()


def intra(round: Round, site: Site, costs: Costs) -> Schedule:
    """The scorers' part first on each rank, then the actor's: on ranks of their own, scorers work beside the actor."""
    layout = _Layout(round, site, costs)
    layout.place_scorers()
    layout.free.close()
    layout.place_actor()
    return layout.schedule()


def woven(round: Round, site: Site, costs: Costs) -> Schedule:
    """The actor's part as early as it can be, and the scorers' in the gaps that it leaves; what finds no gap comes after.

    An actor of one stage leaves no gaps: then the same as `intra`.
    """
    if site.placements["actor"].pp == 1:
        return intra(round, site, costs)
    layout = _Layout(round, site, costs)
    layout.place_actor()
    layout.place_scorers()
    return layout.schedule()


GENERATORS: Mapping[str, Generator] = {"sequential": sequential, "intra": intra, "woven": woven}


def _of_replica(replicas: tuple[tuple[Batch, ...], ...], replica: int) -> tuple[Batch, ...]:
    return replicas[replica] if replica < len(replicas) else ()


def _tokens(batch: Batch) -> int:
    return sum([growth.new for growth in batch])


def _laps(durations: list[list[int]], free: list[int], message: int, steps: int) -> Iterator[list[list[int]]]:
    """Starts of each decode step, by micro-batch and stage; `free` is when each stage may begin.

    A step's starts depend on when the step before lets it begin, and no number but differences counts: once two steps begin
    in the same way, so many nanoseconds apart, all that follow are as far apart.
    """
    ready, lap, apart = [0] * len(durations), list[list[int]](), None
    through = message if len(free) > 1 else 0
    for _ in range(steps):
        if apart is not None:
            lap = [[start + apart for start in row] for row in lap]
        else:
            lap = _lap_starts(durations, ready, free, message)
            before = *ready, *free
            ready = [row[-1] + own[-1] + through for row, own in zip(lap, durations, strict=True)]
            free = [start + duration for start, duration in zip(lap[-1], durations[-1], strict=True)]
            shifts = {after - earlier for after, earlier in zip((*ready, *free), before, strict=True)}
            apart = shifts.pop() if len(shifts) == 1 else None
        yield lap


def _lap_starts(durations: list[list[int]], ready: list[int], free: list[int], message: int) -> list[list[int]]:
    """Starts, by micro-batch and stage, of one decode step of all micro-batches.

    `ready` is when each may enter the first stage, `free` when each stage is done with the step before.  First each
    starts as early as it can; then those that would only wait for the next one start later, close to it, so that what
    a step leaves free of a stage is one gap, but none so late that it would delay the last one in the step after.
    Without it micro-batches of unequal size drift apart.
    """
    starts = _earliest(durations, ready, free, message)
    ready = [row[-1] + own[-1] + message for row, own in zip(starts, durations, strict=True)]
    free = [start + duration for start, duration in zip(starts[-1], durations[-1], strict=True)]
    following = _close(_earliest(durations, ready, free, message), durations, message)
    return _close(starts, durations, message, [row[0] for row in following])


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


def _close(
    starts: list[list[int]], durations: list[list[int]], message: int, needed: list[int] | None = None
) -> list[list[int]]:
    """All but the last as late as the next one lets them, and as they are `needed` for the following step."""
    starts = [list(row) for row in starts]
    for m in range(len(starts) - 2, -1, -1):
        arrival = starts[m + 1][-1] + message
        if needed is not None:
            arrival = min(arrival, needed[m])
        for stage in range(len(durations[m]) - 1, -1, -1):
            arrival = min(starts[m + 1][stage], arrival - message) - durations[m][stage]
            starts[m][stage] = arrival
    return starts


class _Layout:
    """One virtual timeline of a round, being filled.

    Each stage of a replica keeps its actions in the order in which they are placed; `free` says what time is left.
    """

    def __init__(self, round: Round, site: Site, costs: Costs):
        self.round, self.site, self.costs = round, site, costs
        self.message = nanoseconds(costs.message_s)
        self._prefill = {
            (role, replica): [self._prefill_times(role, batch) for batch in batches]
            for role, replicas in round.prefill.items()
            for replica, batches in enumerate(replicas)
        }
        shortest = min((min(each) for own in self._prefill.values() for each, _ in own), default=1)
        self.free = Gaps(site.ranks, shortest)
        self._stage_end: dict[Stage, int] = {}
        self._lists: dict[int, list[tuple[int, int, list[Action]]]] = {rank: [] for rank in site.ranks}
        self._placed = 0

    def place_actor(self) -> None:
        """Its prefill, then its decoding, each as early as it can be."""
        placement = self.site.placements["actor"]
        for replica in range(placement.dp):
            for j in range(len(_of_replica(self.round.prefill.get("actor", ()), replica))):
                self._place_prefill("actor", replica, j)
            self._place_decode(placement, replica, _of_replica(self.round.decode, replica))

    def place_scorers(self) -> None:
        """Their micro-batches, by turns: next is always the replica whose first stage is done with its last one first."""
        roles = [role for role in self.site.placements if role != "actor" and role in self.round.prefill]
        work = {
            (order, replica): len(batches)
            for order, role in enumerate(roles)
            for replica, batches in enumerate(self.round.prefill[role])
            if batches
        }
        turns = [(0, order, replica, 0) for order, replica in work]
        heapify(turns)
        while turns:
            _, order, replica, j = turns[0]
            done = self._place_prefill(roles[order], replica, j)
            if j + 1 < work[order, replica]:
                heapreplace(turns, (done, order, replica, j + 1))
            else:
                heappop(turns)

    def schedule(self) -> Schedule:
        """What was placed; a rank's actions by start, those of equal start as they were placed."""
        return Schedule(
            {
                rank: tuple(action for _, _, actions in sorted(own, key=itemgetter(0, 1)) for action in actions)
                for rank, own in self._lists.items()
                if own
            }
        )

    def _place_decode(self, placement: RolePlacement, replica: int, batches: tuple[Batch, ...]) -> None:
        last, chunk = placement.pp - 1, self.round.index
        durations = [[self._decode_time(stage, batch, stage == last) for stage in range(placement.pp)] for batch in batches]
        stages = [placement.stage_ranks(replica, stage) for stage in range(placement.pp)]
        free = [self.free.end(ranks) for ranks in stages]
        for step, starts in enumerate(_laps(durations, free, self.message, self.round.steps if batches else 0)):
            for m, own in enumerate(durations):
                for stage, duration in enumerate(own):
                    ops = (Op.DECODE, Op.SAMPLE) if stage == last else (Op.DECODE,)
                    # The only replica of the actor on these ranks: what is there ends before the lap does.
                    self.free.append(stages[stage], starts[m][stage], duration)
                    self._list(stages[stage], starts[m][stage], "actor", ops, (m, chunk, step))

    def _place_prefill(self, role: str, replica: int, j: int) -> int:
        """Returns when the first stage is done with it."""
        last = self.site.placements[role].pp - 1
        chunk = self.round.index if role == "actor" else self.round.index - 1
        times, scored = self._prefill[role, replica][j]
        ready = done = 0
        for stage, duration in enumerate([*times[:last], scored]):
            ops = (Op.PREFILL, Op.SCORE) if stage == last and role != "actor" else (Op.PREFILL,)
            end = self._put((role, replica, stage), ops, (j, chunk, None), ready, duration)
            done = end if stage == 0 else done
            ready = end + self.message
        return done

    def _put(self, where: Stage, ops: Iterable[Op], what: What, ready: int, duration: int) -> int:
        """Place `ops`, one directly after the other, on all tensor ranks of a stage.  Returns when they end."""
        role, replica, stage = where
        ranks = self.site.placements[role].stage_ranks(replica, stage)
        start = self.free.fit(ranks, max(ready, self._stage_end.get(where, 0)), duration)
        self.free.take(ranks, start, duration)
        self._stage_end[where] = start + duration
        self._list(ranks, start, role, ops, what)
        return start + duration

    def _list(self, ranks: Iterable[int], start: int, role: str, ops: Iterable[Op], what: What) -> None:
        self._placed += 1
        micro_batch, chunk, step = what
        for rank in ranks:
            actions = [Action(rank, op, role, micro_batch, chunk, step) for op in ops]
            self._lists[rank].append((start, self._placed, actions))

    def _decode_time(self, stage: int, batch: Batch, sampled: bool) -> int:
        seconds = self.costs.decode_at(stage)(len(batch))
        return nanoseconds(seconds + (self.costs.sample(len(batch)) if sampled else 0.0))

    def _prefill_times(self, role: str, batch: Batch) -> tuple[list[int], int]:
        """Of a micro-batch by stage, and with its score on the last."""
        tokens, last = _tokens(batch), self.site.placements[role].pp - 1
        seconds = [self.costs.prefill_at(role, stage)(tokens) for stage in range(last + 1)]
        score_s = self.costs.score(sum([g.rows for g in batch])) if role != "actor" else 0.0
        return [nanoseconds(each) for each in seconds], nanoseconds(seconds[last] + score_s)
