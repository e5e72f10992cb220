"""Plans the rounds of a run: the books say what is to be done, a generator says when, the checker says that it will work.

Every rank plans for itself and comes to the same schedule, because the books advance by what every rank knows.  A rank
that does not hold the actor plans no decoding; nothing that it does itself depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from oppo_megatron.config.overlap import WeaveConfig
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.actions import Schedule
from oppo_megatron.schedule.books import ActorBook, ReplicaWork, ScoringBook
from oppo_megatron.schedule.checker import require_sound
from oppo_megatron.schedule.communication import add_communication
from oppo_megatron.schedule.costs import Costs
from oppo_megatron.schedule.cut import Cut, Work, choose_cut
from oppo_megatron.schedule.generators import GENERATORS
from oppo_megatron.schedule.rounds import KVBudget, Round, Site

KEPT_SCHEDULES = 256

Order = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True)
class PlannedRound:
    """A round, what it asks of each replica of each role, and its schedule.

    The schedule is of the round's shape: its chunks count from 1, not from `round.index` (`Schedule.shifted`).
    """

    round: Round
    works: Mapping[str, Sequence[ReplicaWork]]
    schedule: Schedule


@dataclass
class RoundPlanner:
    """One rank's planner.  `actor` is None on ranks that do not hold it.

    `micro_batch_tokens` bounds every prefill micro-batch; `max_lengths` are the positions of each role's cache.
    """

    site: Site
    generator: str
    weave: WeaveConfig
    micro_batch_tokens: int
    max_length: int
    actor: ActorBook | None
    scorers: Mapping[str, ScoringBook]
    costs: Costs = Costs()
    _known: dict[tuple[object, ...], Schedule] = field(default_factory=dict)

    def plan(
        self, index: int, decode: Sequence[Rollout], score: Sequence[Rollout], chunk: int, order: Order
    ) -> PlannedRound:
        """The round that decodes up to `chunk` tokens of each of `decode` and scores what is new of `score`."""
        cut = self._cut(decode, score, chunk)
        works: dict[str, list[ReplicaWork]] = {}
        steps = chunk if decode else 0
        if self.actor is not None and decode:
            steps = self.actor.steps(decode, chunk)
            works["actor"] = self.actor.plan(decode, steps, cut.micro_batches, self.micro_batch_tokens, order)
        if score:
            sizes = {name: cut.prefill_tokens if self._is_cut(name) else self._whole for name in self.scorers}
            works |= {name: book.plan(score, sizes[name]) for name, book in self.scorers.items()}
        actor = works.get("actor", [])
        round_ = Round(
            index,
            steps,
            tuple(tuple(work.decode) for work in actor),
            {name: tuple(tuple(w.prefill) for w in replicas) for name, replicas in works.items()},
        )
        return PlannedRound(round_, works, self._schedule(round_))

    def _cut(self, decode: Sequence[Rollout], score: Sequence[Rollout], chunk: int) -> Cut:
        """Decode micro-batches of each replica, and the token budget of a prefill micro-batch beside them."""
        micro_batches, tokens = self.weave.micro_batches, self.weave.prefill_tokens
        place = self.site.places["actor"]
        if self.generator != "woven" or place.pp == 1 or self.actor is None:
            return Cut(1 if micro_batches == "auto" else micro_batches, self._whole)
        pending = {name: book.pending(score) for name, book in self.scorers.items() if self._is_cut(name)}
        work = Work(
            num_sequences=max(self.actor.running(decode)),
            steps=self.actor.steps(decode, chunk),
            pp=place.pp,
            prefill_tokens={name: max(map(sum, replicas)) for name, replicas in pending.items()},
        )
        return choose_cut(
            work,
            self.costs,
            self.micro_batch_tokens,
            grain=max((new for replicas in pending.values() for news in replicas for new in news), default=1),
            micro_batches=None if micro_batches == "auto" else micro_batches,
            prefill_tokens=None if tokens == "auto" else self._whole,
        )

    @property
    def _whole(self) -> int:
        """Token budget of a prefill micro-batch that decoding does not cut."""
        tokens = self.weave.prefill_tokens
        return self.micro_batch_tokens if tokens == "auto" else min(tokens, self.micro_batch_tokens)

    def _is_cut(self, role: str) -> bool:
        """Whether a scorer's micro-batches are cut to fit between decode steps: on ranks that all know of the decoding."""
        return set(self.site.places[role].ranks) <= set(self.site.places["actor"].ranks)

    def _schedule(self, round_: Round) -> Schedule:
        """The schedule of the round's shape: sizes of micro-batches do not change what has to be done in which order."""
        counts = tuple((name, tuple(map(len, replicas))) for name, replicas in sorted(round_.prefill.items()))
        key = (round_.steps, tuple(map(len, round_.decode)), counts)
        if key not in self._known:
            if len(self._known) >= KEPT_SCHEDULES:
                self._known.clear()
            shape = Round(1, round_.steps, round_.decode, round_.prefill)
            schedule = GENERATORS[self.generator](shape, self.site, self.costs)
            schedule = add_communication(schedule, shape, self.site)
            require_sound(schedule, shape, self.site, self._budgets(), self.costs)
            self._known[key] = schedule
        return self._known[key]

    def _budgets(self) -> dict[str, list[KVBudget]]:
        """What each cache can hold.  The books never plan for more sequences than there are slots."""
        slots = {name: (book.slots, len(book)) for name, book in self.scorers.items()}
        if self.actor is not None:
            slots["actor"] = (self.actor.slots, len(self.actor))
        return {name: [KVBudget(num, self.max_length)] * replicas for name, (num, replicas) in slots.items()}
