"""Simulate a schedule in virtual time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from oppo_megatron.layout.placements import RankCoordinates
from oppo_megatron.schedule.actions import Action, Op, Schedule
from oppo_megatron.schedule.links import GLOO, Link, Transport, link_of
from oppo_megatron.schedule.rounds import Batch, Round, Site
from oppo_megatron.schedule.weaving.costs import Costs

COMPUTE = (Op.DECODE, Op.SAMPLE, Op.PREFILL, Op.SCORE)


class Span(NamedTuple):
    """One action; a receive's span is its wait."""

    action: Action
    position: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Stuck:
    """`action` waits for `ranks`; `mistaken`: another message came, `held`: why the send is held."""

    action: Action
    position: int
    ranks: tuple[int, ...]
    reason: str
    mistaken: bool = False
    held: str = ""
    remedy: str = ""

    @property
    def rank(self) -> int:
        return self.action.rank


@dataclass(frozen=True)
class Timeline:
    spans: Mapping[int, tuple[Span, ...]]
    stuck: Mapping[int, Stuck]

    @property
    def makespan_s(self) -> float:
        return max((own[-1].end_s for own in self.spans.values() if own), default=0.0)

    @property
    def working(self) -> tuple[int, ...]:
        return tuple(r for r in sorted(self.spans) if any(span.action.op in COMPUTE for span in self.spans[r]))

    def busy_s(self, rank: int) -> float:
        return sum(span.end_s - span.start_s for span in self.spans[rank] if span.action.op in COMPUTE)

    def bubble(self, rank: int | None = None) -> float:
        """Idle share of `rank` (None: of all working ranks), 0 to 1."""
        ranks = self.working if rank is None else (rank,)
        total = self.makespan_s * len(ranks)
        return 1 - sum(map(self.busy_s, ranks)) / total if total else 0.0


Running = Callable[[Action, int], int]
"""Running sequences of a replica's decode micro-step; with 0 it takes no time."""


def simulate(
    schedule: Schedule, round_: Round, site: Site, costs: Costs | None = None, transport: Transport = GLOO, *,
    begun: Mapping[int, float] | None = None, running: Running | None = None,
) -> Timeline:  # fmt: skip
    """Execute until no rank can continue; `begun`: start of each rank's list in seconds."""
    run = _Run(schedule, round_, site, costs or Costs(), transport, running)
    run.clock.update(begun or {})
    while run.ready:
        rank = run.ready.popleft()
        while (woken := run.advance(rank)) is not None:
            run.ready.extend(woken)
    stuck = {rank: run.explain(rank) for rank, own in run.lists.items() if run.position[rank] < len(own)}
    return Timeline({rank: tuple(own) for rank, own in run.spans.items()}, stuck)


def coordinates_at(site: Site, rank: int) -> dict[str, RankCoordinates]:
    found = {role: placement.coords(rank) for role, placement in site.placements.items()}
    return {role: coords for role, coords in found.items() if coords is not None}


def same_action(a: Action | None, b: Action) -> bool:
    """True if two actions differ at most in rank and peer."""
    if a is None or a.op is not b.op or a.micro_batch != b.micro_batch or a.step != b.step:
        return False
    return a.role == b.role and a.chunk == b.chunk


class _Run:
    """`ready`: ranks to examine; `taken`: receive times by link; `made`: links in use."""

    def __init__(
        self, schedule: Schedule, round_: Round, site: Site, costs: Costs, transport: Transport, running: Running | None
    ):
        ranks = sorted({*schedule.actions, *site.ranks})
        self.lists = {rank: schedule.of(rank) for rank in ranks}
        self.position = dict.fromkeys(ranks, 0)
        self.clock = dict.fromkeys(ranks, 0.0)
        self.spans: dict[int, list[Span]] = {rank: [] for rank in ranks}
        self.links: dict[Link, deque[tuple[Action, float]]] = defaultdict(deque)
        self.ready, self.transport, self.holds = deque(ranks), transport, transport.holds
        self.taken: dict[Link, list[float]] = defaultdict(list)
        self.made: set[Link] = set()
        self.round, self.costs, self.running, self.actor_ranks = round_, costs, running, site.placements["actor"].ranks
        self.coords_by_role = {(role, rank): coords for rank in site.ranks for role, coords in coordinates_at(site, rank).items()}
        self.groups = {
            (role, rank): site.placements[role].stage_ranks(coords.replica, coords.stage)
            for (role, rank), coords in self.coords_by_role.items()
        }

    def current(self, rank: int) -> Action | None:
        own = self.lists.get(rank, ())
        position = self.position.get(rank, 0)
        return own[position] if position < len(own) else None

    def advance(self, rank: int) -> tuple[int, ...] | None:
        """Execute the next action. Returns ranks that may continue, or None if the rank must wait."""
        action = self.current(rank)
        if action is None:
            return None
        if action.op is Op.SEND:
            return self._send(action)
        if action.op is Op.RECV:
            return self._receive(action)
        group = self._group(action)
        if not group or not all(same_action(self.current(member), action) for member in group):
            return None
        start = max(self.clock[member] for member in group)
        end = start + self._seconds(action)
        for member in group:
            own = self.current(member)
            assert own is not None
            self._record(own, start, end)
        return tuple(member for member in group if member != rank)

    def explain(self, rank: int) -> Stuck:
        action = self.current(rank)
        assert action is not None
        position = self.position[rank]
        if action.op is Op.SEND:
            held = self._holder(action)
            assert held is not None and action.peer is not None
            reason = f"{held}; {self._whereabouts((action.peer,))}"
            return Stuck(action, position, (action.peer,), reason, held=held, remedy=self.transport.remedy)
        if action.op is Op.RECV:
            link = self.links.get(link_of(action))
            if link:
                return Stuck(action, position, (), f"the next message on this link is `{link[0][0]}`", mistaken=True)
            awaited: tuple[int, ...] = () if action.peer is None else (action.peer,)
            return Stuck(action, position, awaited, f"no such message has been sent; {self._whereabouts(awaited)}")
        group = self._group(action)
        if not group:
            return Stuck(action, position, (), f"rank {rank} holds nothing of the {action.role} role")
        absent = tuple(member for member in group if not same_action(self.current(member), action))
        return Stuck(action, position, absent, f"all of ranks {list(group)} take part; {self._whereabouts(absent)}")

    def _whereabouts(self, ranks: tuple[int, ...]) -> str:
        return ", ".join(
            f"rank {rank} has ended" if (at := self.current(rank)) is None else f"rank {rank} is at `{at}`" for rank in ranks
        )

    def _send(self, action: Action) -> tuple[int, ...] | None:
        start_s = end_s = self.clock[action.rank]
        if self.holds:
            if self._holder(action) is not None:
                return None
            end_s = max(start_s, self._released_s(action))
        self.links[link_of(action)].append((action, end_s + self.costs.message_s))
        self._record(action, start_s, end_s)
        return (action.peer,) if action.peer in self.lists else ()

    def _holder(self, action: Action) -> str | None:
        if not self._meets(action):
            return "the first use of its communicator, for which both ends have to come"
        ahead = self.links[link_of(action)]
        if len(ahead) >= self.transport.in_flight.get(action.payload, len(ahead) + 1):
            return f"after `{ahead[0][0]}`, which has not been received"
        return None

    def _meets(self, action: Action) -> bool:
        link = link_of(action)
        if self.transport.made or link in self.made:
            return True
        other = None if action.peer is None else self.current(action.peer)
        return other is not None and other.peer is not None and link_of(other) == link

    def _released_s(self, action: Action) -> float:
        """Time of a held send's release; its link is then in use."""
        link, moments = link_of(action), [0.0]
        if not self.transport.made and link not in self.made and action.peer is not None:
            self.made.add(link)
            moments.append(self.clock[action.peer])
        taken, most = self.taken[link], self.transport.in_flight.get(action.payload)
        number = len(taken) + len(self.links[link])
        if most is not None and number >= most:
            moments.append(taken[number - most])
        return max(moments)

    def _receive(self, action: Action) -> tuple[int, ...] | None:
        name = link_of(action)
        link = self.links[name]
        sent = link[0][0] if link else None
        if sent is None or (sent.micro_batch, sent.chunk, sent.step) != (action.micro_batch, action.chunk, action.step):
            other = None if action.peer is None else self.current(action.peer)
            if self.holds and other is not None and other.op is Op.SEND and self._meets(other):
                self.ready.append(other.rank)  # its first send was held until this receive
            return None
        _, arrival = link.popleft()
        self._record(action, self.clock[action.rank], max(self.clock[action.rank], arrival))
        if not self.holds:
            return ()
        self.taken[name].append(self.clock[action.rank])
        return (name[0],)

    def _group(self, action: Action) -> tuple[int, ...]:
        if action.op is Op.GATHER:
            return self.actor_ranks if action.rank in self.actor_ranks else ()
        return self.groups.get((action.role, action.rank), ())

    def _seconds(self, action: Action) -> float:
        if action.op is Op.GATHER:
            return self.costs.message_s
        coords = self.coords_by_role[action.role, action.rank]
        decodes = action.op in (Op.DECODE, Op.SAMPLE)
        replicas = self.round.decode if decodes else self.round.prefill.get(action.role, ())
        batches = replicas[coords.replica] if coords.replica < len(replicas) else ()
        batch: Batch = batches[action.micro_batch] if action.micro_batch < len(batches) else ()
        if decodes:
            size = len(batch) if self.running is None else self.running(action, coords.replica)
            line = self.costs.decode_at(coords.stage) if action.op is Op.DECODE else self.costs.sample
            return line(size) if size else 0.0
        if action.op is Op.PREFILL:
            return self.costs.prefill_at(action.role, coords.stage)(sum(growth.new for growth in batch))
        return self.costs.score(sum(growth.rows for growth in batch))

    def _record(self, action: Action, start_s: float, end_s: float) -> None:
        rank = action.rank
        self.spans[rank].append(Span(action, self.position[rank], start_s, end_s))
        self.clock[rank] = end_s
        self.position[rank] += 1
