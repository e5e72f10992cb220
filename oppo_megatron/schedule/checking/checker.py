from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import product

from oppo_megatron.errors import ScheduleError
from oppo_megatron.layout.placements import RankCoordinates, RolePlacement
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.caches import Budgets, cache_faults, listed
from oppo_megatron.schedule.checking.timeline import COMPUTE, Stuck, Timeline, coordinates_at, simulate
from oppo_megatron.schedule.links import GLOO, Transport
from oppo_megatron.schedule.rounds import Round, Site
from oppo_megatron.schedule.weaving.costs import Costs

Step = tuple[int, int | None]
"""Micro-batch and decode step; None for prefill."""

Trouble = tuple[str, str]
"""Kind of fault, and what the action does wrong."""

RECEIVED, RESULT = "received hidden state", "result"
CAUSALITY, ORDER = "causality", "order"


def causality_faults(
    schedule: Schedule, round_: Round, site: Site, skip: Collection[tuple[int, int]]
) -> Iterator[tuple[str, int, int, Action, str]]:
    """Yield (kind, rank, position, action, text) of each fault, except at `skip` (rank, position)."""
    for rank in sorted(schedule.actions):
        state = _RankState(round_, site, coordinates_at(site, rank))
        for position, action in enumerate(schedule.of(rank)):
            if (rank, position) not in skip:
                for kind, text in state.visit(action):
                    yield kind, rank, position, action, text


@dataclass
class _RankState:
    """A rank holds one hidden state per role, the last received or computed."""

    round: Round
    site: Site
    coords_by_role: Mapping[str, RankCoordinates]
    held: dict[str, tuple[str, Step]] = field(default_factory=dict)
    tokens: set[Step] = field(default_factory=set)
    prefilled: dict[str, int] = field(default_factory=dict)
    decoded: tuple[int, int] = (-1, -1)
    gathered: bool = False
    received_chunk: bool = False

    def visit(self, action: Action) -> Iterator[Trouble]:
        this = action.micro_batch, action.step
        if action.op is Op.GATHER:
            yield from self._whole_chunk(gathered=True)
            self.gathered = True
        elif action.op is Op.SEND:
            if action.payload is Payload.HIDDEN:
                yield from self._use(RESULT, action, "sends a hidden state that is not the last one computed")
            elif action.payload is Payload.TOKENS and this not in self.tokens:
                yield CAUSALITY, "sends tokens that are not drawn yet; sending follows sampling; move it after that"
            elif action.payload is Payload.CHUNK:
                yield from self._whole_chunk(gathered=self.gathered or self.site.placements["actor"].dp == 1)
        elif action.op is Op.RECV:
            if action.payload is Payload.TOKENS:
                self.tokens.add(this)
            elif action.payload is Payload.HIDDEN:
                yield from self._hold(RECEIVED, action)
            else:
                self.received_chunk = True
        elif action.op is Op.DECODE:
            yield from self._decode(action)
        elif action.op is Op.PREFILL:
            yield from self._prefill(action)
        else:
            source = "decode" if action.op is Op.SAMPLE else "prefill"
            yield from self._use(RESULT, action, f"does not follow its own {source}, the last one computed")
            if action.op is Op.SAMPLE:
                self.tokens.add(this)

    def _decode(self, action: Action) -> Iterator[Trouble]:
        coords, step = self.coords_by_role["actor"], action.step or 0
        prefills = self.round.prefill.get("actor", ())
        waiting = len(prefills[coords.replica]) if coords.replica < len(prefills) else 0
        if self.prefilled.get("actor", 0) < waiting:
            yield CAUSALITY, "comes before the actor's prefill; decoding builds upon it; move it after that"
        if (step, action.micro_batch) < self.decoded:
            before = f"step {self.decoded[0]} of m{self.decoded[1]}"
            yield ORDER, f"comes after {before}; a stage decodes by step, then micro-batch; move it before that"
        if step > 0 and (action.micro_batch, step - 1) not in self.tokens:
            yield CAUSALITY, "comes before the tokens of the previous step; it continues them; move it after these"
        yield from self._compute(action, coords)
        self.decoded = max(self.decoded, (step, action.micro_batch))

    def _prefill(self, action: Action) -> Iterator[Trouble]:
        done = self.prefilled.get(action.role, 0)
        if action.micro_batch != done:
            yield ORDER, f"comes where m{done} is due; a role prefills its micro-batches in order; sort them"
        yield from self._compute(action, self.coords_by_role[action.role])
        self.prefilled[action.role] = done + 1

    def _compute(self, action: Action, coords: RankCoordinates) -> Iterator[Trouble]:
        if coords.stage > 0:
            yield from self._use(RECEIVED, action, "uses a hidden state that is not the last one received")
        yield from self._hold(RESULT, action)

    def _use(self, what: str, action: Action, trouble: str) -> Iterator[Trouble]:
        if self.held.pop(action.role, None) != (what, (action.micro_batch, action.step)):
            yield CAUSALITY, f"{trouble}; a rank holds one of each role; move it to directly after what makes it"

    def _hold(self, what: str, action: Action) -> Iterator[Trouble]:
        if action.role in self.held:
            held, (m, step) = self.held[action.role]
            yield (
                CAUSALITY,
                f"overwrites the {held} of m{m}{'' if step is None else f' s{step}'} before it is used; a rank holds one "
                "hidden state of each role; move it to after the action that uses that one",
            )
        last = self.coords_by_role[action.role].stage == self.site.placements[action.role].pp - 1
        if not (action.op is Op.PREFILL and action.role == "actor" and last):
            self.held[action.role] = what, (action.micro_batch, action.step)

    def _whole_chunk(self, gathered: bool) -> Iterator[Trouble]:
        coords = self.coords_by_role.get("actor")
        unknown = "comes before this rank knows the whole chunk; move it after its"
        if coords is None:
            if not self.received_chunk:
                yield CAUSALITY, f"{unknown} receive"
            return
        batches = self.round.decode[coords.replica] if coords.replica < len(self.round.decode) else ()
        if not gathered or len(self.tokens) < self.round.steps * len(batches):
            yield CAUSALITY, f"{unknown} last tokens"


class FaultKind(str, Enum):
    MISSING = "missing"  # a required action that no list has
    DOUBLED = "doubled"  # an action that a rank has twice
    FOREIGN = "foreign"  # an action that the round does not require of this rank
    ORDER = "order"  # messages received in another order than sent; micro-batches out of order
    CAUSALITY = "causality"  # something is used before it exists
    KV = "kv"  # a cache overflows, or lacks the tokens that a micro-batch continues
    PLAN = "plan"  # a rank has planned another round than its peers
    DEADLOCK = "deadlock"  # ranks wait for each other, or for a message that never comes


@dataclass(frozen=True, slots=True)
class Fault:
    """`message` has fault, rule and remedy. `action` is None for caches and missing actions."""

    kind: FaultKind
    rank: int
    position: int
    action: Action | None
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank}, action {self.position}, {self.kind.value}: {self.message}"


def check(
    schedule: Schedule, round: Round, site: Site, budgets: Budgets, costs: Costs | None = None, transport: Transport = GLOO
) -> list[Fault]:
    """Return every fault, causes first. Raises ScheduleError if the round has more replicas than the site."""
    return check_timeline(schedule, round, site, budgets, simulate(schedule, round, site, costs, transport))


def check_timeline(schedule: Schedule, round: Round, site: Site, budgets: Budgets, timeline: Timeline) -> list[Fault]:
    faults = [*_inventory(schedule, round, site)]
    flagged = {(fault.rank, fault.position) for fault in faults}
    faults += [
        Fault(FaultKind(kind), rank, position, action, f"`{action}` {text}")
        for kind, rank, position, action, text in causality_faults(schedule, round, site, flagged)
    ]
    for role, placement in site.placements.items():
        for d in range(placement.dp):
            for text in cache_faults(round, role, d, budgets[role][d] if role in budgets else None):
                remedy = "give the cache more memory, or the round fewer or shorter sequences in their order"
                faults.append(Fault(FaultKind.KV, placement.rank(d, 0, 0), 0, None, f"{text}; {remedy}"))
    return faults + [*_deadlocks(timeline)]


def require_sound(
    schedule: Schedule, round: Round, site: Site, budgets: Budgets, costs: Costs | None = None, transport: Transport = GLOO
) -> None:
    faults = check(schedule, round, site, budgets, costs, transport)
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ScheduleError(f"{count} in the schedule of round {round.index}, over {transport.name}:\n{listed(faults)}")


def _required(round_: Round, site: Site) -> Iterator[Action]:
    for role, replicas in (("actor", round_.decode), *round_.prefill.items()):
        dp = site.placements[role].dp if role in site.placements else 0
        if len(replicas) > dp:
            raise ScheduleError(
                f"the round has work for {len(replicas)} replicas of the {role} role, which has {dp}; plan the round for "
                "the same layout"
            )
    actor = site.placements["actor"]
    for role, replicas in round_.prefill.items():
        chunk = round_.index if role == "actor" else round_.index - 1
        for d, batches in enumerate(replicas):
            for m in range(len(batches)):
                yield from _unit(site.placements[role], d, (role, m, chunk, None))
    for d, batches in enumerate(round_.decode):
        for m, step in product(range(len(batches)), range(round_.steps)):
            yield from _unit(actor, d, ("actor", m, round_.index, step))
    if round_.decodes:
        key = "actor", 0, round_.index
        if actor.dp > 1:
            yield from (Action(rank, Op.GATHER, *key) for rank in actor.ranks)
        for listener, sender in site.fed_by.items():
            yield Action(sender, Op.SEND, *key, None, Payload.CHUNK, listener)
            yield Action(listener, Op.RECV, *key, None, Payload.CHUNK, sender)


def _unit(placement: RolePlacement, replica: int, what: tuple[str, int, int, int | None]) -> Iterator[Action]:
    (role, _, _, step), last = what, placement.pp - 1
    first, then = (Op.PREFILL, Op.SCORE) if step is None else (Op.DECODE, Op.SAMPLE)
    for stage in range(placement.pp):
        for shard, rank in enumerate(placement.stage_ranks(replica, stage)):
            yield Action(rank, first, *what)
            if stage == last:
                if step is not None or role != "actor":
                    yield Action(rank, then, *what)
                continue
            after, drawn_by = placement.rank(replica, stage + 1, shard), placement.rank(replica, last, shard)
            yield Action(rank, Op.SEND, *what, Payload.HIDDEN, after)
            yield Action(after, Op.RECV, *what, Payload.HIDDEN, rank)
            if step is not None:
                yield Action(drawn_by, Op.SEND, *what, Payload.TOKENS, rank)
                yield Action(rank, Op.RECV, *what, Payload.TOKENS, drawn_by)


def _inventory(schedule: Schedule, round: Round, site: Site) -> Iterator[Fault]:
    done = dict.fromkeys(_required(round, site), False)
    for rank in sorted(schedule.actions):
        chunk_here = False
        for position, action in enumerate(schedule.of(rank)):
            is_done = done.get(action)
            if action.rank != rank:
                message = f"`{action}` names rank {action.rank}; a list holds its own rank's actions; move it there"
                yield Fault(FaultKind.FOREIGN, rank, position, action, message)
            elif is_done is None:
                kind, text = _unasked(action, round, site, chunk_here)
                yield Fault(kind, rank, position, action, f"`{action}` {text}")
            elif is_done:
                message = f"`{action}` occurs a second time; every action is done once; remove one"
                yield Fault(FaultKind.DOUBLED, rank, position, action, message)
            else:
                done[action] = True
            chunk_here = chunk_here or (action.payload is Payload.CHUNK and action.op is Op.RECV)
    for action in (action for action, is_done in done.items() if not is_done):
        message = f"rank {action.rank} has no `{action}`; the round asks for it; add it to the rank's list"
        yield Fault(FaultKind.MISSING, action.rank, len(schedule.of(action.rank)), None, message)


def _unasked(action: Action, round: Round, site: Site, chunk_here: bool) -> tuple[FaultKind, str]:
    if action.role not in site.placements:
        return FaultKind.FOREIGN, f"is of no role of the site ({', '.join(site.placements)}); correct the role"
    ranks = site.placements[action.role].ranks
    if action.op in COMPUTE and action.rank not in ranks:
        return FaultKind.FOREIGN, f"is not for rank {action.rank}: {action.role} is on ranks {list(ranks)}; move it"
    scores = action.op in (Op.PREFILL, Op.SCORE) and action.role != "actor"
    if scores and action.chunk >= round.index and not chunk_here:
        rule = f"only chunks before {round.index} are known when the round begins"
        return FaultKind.CAUSALITY, f"uses a chunk before it has been decoded; {rule}; do it a round later"
    return FaultKind.FOREIGN, f"is nothing that round {round.index} asks of rank {action.rank}; remove it"


def _deadlocks(timeline: Timeline) -> Iterator[Fault]:
    for rank, stuck in sorted(timeline.stuck.items()):
        if stuck.mistaken:
            rule = "messages of a link arrive in the order sent; give both lists the same order"
            yield Fault(FaultKind.ORDER, rank, stuck.position, stuck.action, f"`{stuck.action}`: {stuck.reason}; {rule}")
    seen: set[int] = set()
    for rank in sorted(timeline.stuck):
        chain: dict[int, Stuck] = {}
        at: int | None = rank
        while at is not None and at in timeline.stuck and at not in seen and at not in chain:
            chain[at] = timeline.stuck[at]
            # Prefer a rank that will never come.
            awaited = chain[at].ranks
            at = next((other for other in awaited if other not in timeline.stuck), next(iter(awaited), None))
        reported = at in seen  # the rest belongs to an earlier chain
        seen |= chain.keys()
        waiting = list(chain.values())
        if not waiting or reported or waiting[-1].mistaken:
            continue
        ring = at in chain
        yield _waiting(waiting[list(chain).index(at) :] if at is not None and ring else waiting, ring)


def _waiting(chain: list[Stuck], ring: bool) -> Fault:
    held = [f" ({stuck.held})" if stuck.held else "" for stuck in chain]
    steps = [f"rank {stuck.rank} waits at `{stuck.action}`{why}" for stuck, why in zip(chain, held, strict=True)]
    end = f"for rank {chain[0].rank}" if ring else f"where {chain[-1].reason}"
    rule = "an awaited action must come before the wait for it" if ring else "some rank must do the awaited action"
    remedies = dict.fromkeys(stuck.remedy for stuck in chain if stuck.remedy)
    remedy = ", or ".join([*remedies, "put the awaited action earlier in its list, or add it"])
    last = chain[0] if ring else chain[-1]
    message = f"{', for '.join(steps)}, {end}; {rule}; {remedy}"
    return Fault(FaultKind.DEADLOCK, last.rank, last.position, last.action, message)
