"""One pass over each rank's list: nothing is used before it exists, and no cache overflows.

Messages are actions, so a rank's state follows from its own list alone.  Per role a rank holds one hidden state: the one received
last, or the result (hidden state, logits) of the last decode or prefill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from oppo_megatron.layout.placements import RankCoordinates
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.caches import Budgets
from oppo_megatron.schedule.checking.timeline import batch_of, coordinates_at
from oppo_megatron.schedule.rounds import Fork, Forks, Round, Site

Step = tuple[int, int | None]
"""Micro-batch and decode step; None for prefill."""

Trouble = tuple[str, str]
"""Kind of fault, and what the action does wrong."""

RECEIVED, RESULT = "received hidden state", "result"
CAUSALITY, ORDER, KV = "causality", "order", "kv"


def causality_faults(
    schedule: Schedule, round_: Round, site: Site, budgets: Budgets, skip: Collection[tuple[int, int]] = ()
) -> Iterator[tuple[str, int, int, Action, str]]:
    """Yield (kind, rank, position, action, text) of each fault; actions at `skip` (rank, position) are ignored."""
    overflowed: set[tuple[str, int, str]] = set()
    for rank in sorted(schedule.actions):
        state = _RankState(round_, site, coordinates_at(site, rank), budgets, overflowed)
        for position, action in enumerate(schedule.of(rank)):
            if (rank, position) not in skip:
                for kind, text in state.visit(action):
                    yield kind, rank, position, action, text


class _Forked:
    """Cached tokens of a role's forked sequences (0 before the fork), and of their sources."""

    def __init__(self, forks: Sequence[Fork]):
        self._left = Forks(forks)
        self.lengths = {fork.target: 0 for fork in forks} | {fork.source: fork.held for fork in forks}
        for source in self._left.sources:
            self.grown(source, self.lengths[source])

    def grown(self, seq_id: int, length: int) -> None:
        self.lengths |= {fork.target: fork.tokens for fork in self._left.due(seq_id, length)}


@dataclass
class _RankState:
    """State of one rank after each action.  `overflowed`: caches whose overflow has been reported, by any rank."""

    round: Round
    site: Site
    coords_by_role: Mapping[str, RankCoordinates]
    budgets: Budgets
    overflowed: set[tuple[str, int, str]]
    held: dict[str, tuple[str, Step]] = field(default_factory=dict)
    tokens: set[Step] = field(default_factory=set)
    cached: dict[str, dict[int, int]] = field(default_factory=dict)
    forked: dict[str, _Forked] = field(default_factory=dict)
    prefilled: dict[str, int] = field(default_factory=dict)
    decoded: tuple[int, int] = (-1, -1)
    gathered: bool = False
    received_chunk: bool = False

    def visit(self, action: Action) -> Iterator[Trouble]:
        """Yield the faults of the next action, and apply it."""
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
        yield from self._compute(action, coords, step)
        self.decoded = max(self.decoded, (step, action.micro_batch))

    def _prefill(self, action: Action) -> Iterator[Trouble]:
        done = self.prefilled.get(action.role, 0)
        if action.micro_batch != done:
            yield ORDER, f"comes where m{done} is due; a role prefills its micro-batches in order; sort them"
        yield from self._compute(action, self.coords_by_role[action.role], None)
        self.prefilled[action.role] = done + 1

    def _compute(self, action: Action, coords: RankCoordinates, step: int | None) -> Iterator[Trouble]:
        if coords.stage > 0:
            yield from self._use(RECEIVED, action, "uses a hidden state that is not the last one received")
        yield from self._grow(action, coords, step)
        yield from self._hold(RESULT, action)

    def _use(self, what: str, action: Action, trouble: str) -> Iterator[Trouble]:
        if self.held.pop(action.role, None) != (what, (action.micro_batch, action.step)):
            yield CAUSALITY, f"{trouble}; a rank holds one of each role; move it to directly after what makes it"

    def _hold(self, what: str, action: Action) -> Iterator[Trouble]:
        """Hold a state until a decode, prefill, send, sample or score uses it; the actor's last stage prefills for none."""
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
        coords, unknown = (
            self.coords_by_role.get("actor"),
            "comes before this rank knows the whole chunk; move it after its",
        )
        if coords is None:
            if not self.received_chunk:
                yield CAUSALITY, f"{unknown} receive"
            return
        batches = self.round.decode[coords.replica] if coords.replica < len(self.round.decode) else ()
        if not gathered or len(self.tokens) < self.round.steps * len(batches):
            yield CAUSALITY, f"{unknown} last tokens"

    def _grow(self, action: Action, coords: RankCoordinates, step: int | None) -> Iterator[Trouble]:
        """Grow the role's cache by the micro-batch, or by one decode step of it."""
        role, replica = action.role, coords.replica
        batch, cached = batch_of(self.round, action, replica), self.cached.setdefault(role, {})
        if role not in self.forked:
            self.forked[role] = _Forked(self.round.forks_of(role, replica))
        forked = self.forked[role]
        if step:  # step 0 has taken the slots and compared the cached tokens
            lengths = [min(step + 1, g.new) + g.past for g in batch]
        else:
            for growth in batch:
                held = cached.get(growth.seq_id, forked.lengths.get(growth.seq_id, growth.past))
                if held != growth.past:
                    continued = (
                        f"continues sequence {growth.seq_id} at {growth.past} tokens, but its cache holds {held}"
                    )
                    yield KV, f"{continued}; a micro-batch continues the cached tokens; put it in its order"
            lengths = [g.past + (g.new if step is None else min(1, g.new)) for g in batch]
        for growth, length in zip(batch, lengths, strict=True):
            cached[growth.seq_id] = length
            forked.grown(growth.seq_id, length)
        if role not in self.budgets:
            return
        # Once per cache: all stages and tensor ranks of a replica have the same.
        budget, cache, text = self.budgets[role][replica], f"the cache of {role} replica {replica}", ""
        if (role, replica, "slots") not in self.overflowed:
            if len(batch) > budget.slots:
                text = f"is of {len(batch)} sequences; {cache} has {budget.slots} slots, too few for one micro-batch"
                yield KV, f"{text}; give it more memory or make micro-batches smaller"
            elif budget.others + len(cached) > budget.slots:
                text = f"makes {len(cached)} sequences and {budget.others} others; {cache} has {budget.slots} slots"
                yield KV, f"{text}; give it more memory or the round fewer sequences"
            if text:
                self.overflowed.add((role, replica, "slots"))
        longest = max(lengths, default=0)
        if longest > budget.max_length and (role, replica, "length") not in self.overflowed:
            self.overflowed.add((role, replica, "length"))
            text = f"makes a sequence of {longest} tokens; {cache} has room for {budget.max_length} of each"
            yield KV, f"{text}; give it longer sequences or end this one sooner"
