"""One pass over each rank's list: nothing is used before it is there, and no cache overruns its budget.

Messages are actions of their own, so the state of a rank at an action follows from its own list alone.  Of each role a rank
holds one hidden state: the one received last, or the result (hidden state, logits) of the last decode or prefill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from oppo_megatron.layout.placements import RankCoordinates
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.faults import Fault, FaultKind
from oppo_megatron.schedule.checking.timeline import batch_of, coordinates_at
from oppo_megatron.schedule.rounds import Batch, Fork, Forks, KVBudget, Round, Site

Step = tuple[int, int | None]
"""Micro-batch and decode step; None for prefill."""

RECEIVED, RESULT = "received hidden state", "result"


def walk_ranks(
    schedule: Schedule,
    round_: Round,
    site: Site,
    budgets: Mapping[str, Sequence[KVBudget]],
    skip: Collection[tuple[int, int]] = (),
) -> list[Fault]:
    """The faults of every rank.  Actions at `skip` (rank, position) are passed over: they do not belong there."""
    faults: list[Fault] = []
    told: set[tuple[str, int, str]] = set()
    for rank in sorted(schedule.actions):
        walk = _Walk(rank, round_, site, coordinates_at(site, rank), budgets, told)
        for position, action in enumerate(schedule.of(rank)):
            if (rank, position) not in skip:
                faults += [
                    Fault(kind, rank, position, action, f"`{action}` {text}") for kind, text in walk.visit(action)
                ]
    return faults


Trouble = tuple[FaultKind, str]


class _Forked:
    """Tokens of the sequences that a role's cache forks, 0 before that, and of those that they are forked from."""

    def __init__(self, forks: Sequence[Fork]):
        self._left = Forks(forks)
        self.lengths = {fork.target: 0 for fork in forks} | {fork.source: fork.held for fork in forks}
        for source in self._left.sources:
            self.grown(source, self.lengths[source])

    def grown(self, seq_id: int, length: int) -> None:
        """The sequence has so many tokens now."""
        self.lengths |= {fork.target: fork.tokens for fork in self._left.due(seq_id, length)}


@dataclass
class _Walk:
    """What one rank has, as its list goes on.  `told`: caches whose overrun has been reported, by any rank."""

    rank: int
    round: Round
    site: Site
    coords_by_role: Mapping[str, RankCoordinates]
    budgets: Mapping[str, Sequence[KVBudget]]
    told: set[tuple[str, int, str]]
    held: dict[str, tuple[str, Step]] = field(default_factory=dict)
    tokens: set[Step] = field(default_factory=set)
    cached: dict[str, dict[int, int]] = field(default_factory=dict)
    forked: dict[str, _Forked] = field(default_factory=dict)
    prefilled: dict[str, int] = field(default_factory=dict)
    decoded: tuple[int, int] = (-1, -1)
    gathered: bool = False
    heard: bool = False

    def visit(self, action: Action) -> Iterator[Trouble]:
        """The faults of doing `action` now; then it counts as done."""
        if action.op is Op.GATHER:
            yield from self._whole_chunk(gathered=True)
            self.gathered = True
        elif action.op is Op.SEND:
            yield from self._send(action)
        elif action.op is Op.RECV:
            yield from self._receive(action)
        elif action.op is Op.DECODE:
            yield from self._decode(action)
        elif action.op is Op.PREFILL:
            yield from self._prefill(action)
        else:
            yield from self._finish(action)

    def _send(self, action: Action) -> Iterator[Trouble]:
        if action.payload is Payload.HIDDEN:
            yield from self._use(RESULT, action, "sends a hidden state that is not the last one computed")
        elif action.payload is Payload.TOKENS and (action.micro_batch, action.step) not in self.tokens:
            yield FaultKind.CAUSALITY, "sends tokens that are not drawn yet; sending follows sampling; put it behind"
        elif action.payload is Payload.CHUNK:
            yield from self._whole_chunk(gathered=self.gathered or self.site.placements["actor"].dp == 1)

    def _receive(self, action: Action) -> Iterator[Trouble]:
        if action.payload is Payload.TOKENS:
            self.tokens.add((action.micro_batch, action.step))
        elif action.payload is Payload.HIDDEN:
            yield from self._hold(RECEIVED, action)
        else:
            self.heard = True

    def _decode(self, action: Action) -> Iterator[Trouble]:
        coords, step = self.coords_by_role["actor"], action.step or 0
        prefills = self.round.prefill.get("actor", ())
        waiting = len(prefills[coords.replica]) if coords.replica < len(prefills) else 0
        if self.prefilled.get("actor", 0) < waiting:
            yield FaultKind.CAUSALITY, "comes before the actor's prefill; decoding builds upon it; put it behind"
        if (step, action.micro_batch) < self.decoded:
            yield (
                FaultKind.ORDER,
                f"comes after step {self.decoded[0]} of m{self.decoded[1]}; a stage decodes by step, then micro-batch; "
                "put it before",
            )
        if step > 0 and (action.micro_batch, step - 1) not in self.tokens:
            yield FaultKind.CAUSALITY, "comes before the tokens of the step before it; it continues them; put it behind"
        yield from self._input(action, coords)
        yield from self._grow(action, coords, step)
        self.decoded = max(self.decoded, (step, action.micro_batch))
        yield from self._hold(RESULT, action)

    def _prefill(self, action: Action) -> Iterator[Trouble]:
        coords, done = self.coords_by_role[action.role], self.prefilled.get(action.role, 0)
        if action.micro_batch != done:
            yield FaultKind.ORDER, f"comes where m{done} is due; a role prefills its micro-batches in order; sort them"
        yield from self._input(action, coords)
        yield from self._grow(action, coords, None)
        self.prefilled[action.role] = done + 1
        yield from self._hold(RESULT, action)

    def _finish(self, action: Action) -> Iterator[Trouble]:
        """Sample, score."""
        source = "decode" if action.op is Op.SAMPLE else "prefill"
        yield from self._use(RESULT, action, f"does not follow its own {source}, the last one computed")
        if action.op is Op.SAMPLE:
            self.tokens.add((action.micro_batch, action.step))

    def _input(self, action: Action, coords: RankCoordinates) -> Iterator[Trouble]:
        if coords.stage > 0:
            yield from self._use(RECEIVED, action, "uses a hidden state that is not the last one received")

    def _use(self, what: str, action: Action, trouble: str) -> Iterator[Trouble]:
        if self.held.pop(action.role, None) != (what, (action.micro_batch, action.step)):
            yield FaultKind.CAUSALITY, f"{trouble}; a rank holds one of each role; put it directly behind what makes it"

    def _hold(self, what: str, action: Action) -> Iterator[Trouble]:
        """The held state waits for a decode, prefill, send, sample or score; the actor's last stage prefills for none."""
        if action.role in self.held:
            held, (m, step) = self.held[action.role]
            yield (
                FaultKind.CAUSALITY,
                f"overwrites the {held} of m{m}{'' if step is None else f' s{step}'} before it is used; a rank holds one "
                "hidden state of each role; put it behind the action that uses that one",
            )
        coords = self.coords_by_role[action.role]
        if action.op is Op.PREFILL and action.role == "actor" and coords.stage == self.site.placements["actor"].pp - 1:
            return
        self.held[action.role] = what, (action.micro_batch, action.step)

    def _whole_chunk(self, gathered: bool) -> Iterator[Trouble]:
        coords, unknown = self.coords_by_role.get("actor"), "comes before this rank knows the whole chunk; put it behind its"
        if coords is None:
            if not self.heard:
                yield FaultKind.CAUSALITY, f"{unknown} receive"
            return
        batches = self.round.decode[coords.replica] if coords.replica < len(self.round.decode) else ()
        if not gathered or len(self.tokens) < self.round.steps * len(batches):
            yield FaultKind.CAUSALITY, f"{unknown} last tokens"

    def _grow(self, action: Action, coords: RankCoordinates, step: int | None) -> Iterator[Trouble]:
        """Let the cache of the role grow by the micro-batch, or by one step of it."""
        batch = batch_of(self.round, action, coords.replica)
        cached = self.cached.setdefault(action.role, {})
        if action.role not in self.forked:
            self.forked[action.role] = _Forked(self.round.forks_of(action.role, coords.replica))
        forked = self.forked[action.role]
        if step:  # the slots are taken and the past has been compared at step 0
            lengths = [min(step + 1, g.new) + g.past for g in batch]
        else:
            for growth in batch:
                held = cached.get(growth.seq_id, forked.lengths.get(growth.seq_id, growth.past))
                if held != growth.past:
                    yield (
                        FaultKind.KV,
                        f"continues sequence {growth.seq_id} at {growth.past} tokens where its cache holds "
                        f"{held}; a micro-batch continues the cached tokens; put it in its order",
                    )
            lengths = [g.past + (g.new if step is None else min(1, g.new)) for g in batch]
        for growth, length in zip(batch, lengths, strict=True):
            cached[growth.seq_id] = length
            forked.grown(growth.seq_id, length)
        budgets = self.budgets.get(action.role)
        if budgets is not None:
            yield from self._within(budgets[coords.replica], action.role, coords.replica, batch, cached, lengths)

    def _within(
        self,
        budget: KVBudget,
        role: str,
        replica: int,
        batch: Batch,
        cached: Mapping[int, int],
        lengths: Sequence[int],
    ) -> Iterator[Trouble]:
        cache = f"the cache of {role} replica {replica}"
        if len(batch) > budget.slots:
            text = f"is of {len(batch)} sequences; {cache} has {budget.slots} slots, too few for one micro-batch; "
            yield from self._tell(role, replica, "slots", f"{text}give it more memory or make micro-batches smaller")
        elif budget.others + len(cached) > budget.slots:
            text = f"makes {len(cached)} sequences beside {budget.others} others; {cache} has {budget.slots} slots; "
            yield from self._tell(role, replica, "slots", f"{text}give it more memory or the round fewer sequences")
        if max(lengths, default=0) > budget.max_length:
            text = f"makes a sequence of {max(lengths)} tokens; {cache} has room for {budget.max_length} of each; "
            yield from self._tell(role, replica, "length", f"{text}give it longer sequences or end this one sooner")

    def _tell(self, role: str, replica: int, what: str, text: str) -> Iterator[Trouble]:
        """An overrun, once for each cache: all stages and tensor ranks of a replica have the same."""
        if (role, replica, what) not in self.told:
            self.told.add((role, replica, what))
            yield FaultKind.KV, text
