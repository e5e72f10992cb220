"""Check that results exist before use; a rank holds one hidden state per role, the last received or computed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from oppo_megatron.layout.placements import RankCoordinates
from oppo_megatron.schedule.actions import Action, Op, Payload, Schedule
from oppo_megatron.schedule.checking.timeline import coordinates_at
from oppo_megatron.schedule.rounds import Round, Site

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
