"""Plans the rounds of a run: the books give the work, a generator its order, and the checker proves the result.

Every rank plans for itself and reaches the same schedule, because the books advance by chunks that every rank records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from oppo_megatron.records import Rollout
from oppo_megatron.schedule.actions import Schedule
from oppo_megatron.schedule.checking.caches import require_room
from oppo_megatron.schedule.checking.checker import require_sound
from oppo_megatron.schedule.planning.books import ActorBook, Book, ReplicaWork, ScoringBook
from oppo_megatron.schedule.rounds import KVBudget, Round, Site
from oppo_megatron.schedule.weaving.communication import add_communication
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.cut import Cut, Work, choose_cut
from oppo_megatron.schedule.weaving.generators import GENERATORS, component

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
    """One rank's planner.

    `weave` is `overlap.weave`; `micro_batch_tokens` bounds every prefill micro-batch, `max_length` every cached sequence.
    With `rank` the schedule has only what that rank and the ranks tied to it do: for that rank the same, and sooner made.
    `late` are scorers that read nothing in rounds that decode.
    """

    site: Site
    generator: str
    weave: Sequence[int | Literal["auto"]]
    micro_batch_tokens: int
    max_length: int
    actor: ActorBook
    scorers: Mapping[str, ScoringBook]
    costs: Costs = Costs()
    rank: int | None = None
    late: Set[str] = frozenset()
    _known: dict[tuple[object, ...], Schedule] = field(default_factory=dict)
    _cuts: dict[tuple[object, ...], Cut] = field(default_factory=dict)

    def plan(
        self,
        index: int,
        decode: Sequence[Rollout],
        score: Sequence[Rollout],
        chunk: int,
        order: Order,
        readable: Set[int] | None = None,
    ) -> PlannedRound:
        """The round that decodes up to `chunk` tokens of each of `decode` and scores the new tokens of `score`.

        Roles whose outputs do not outlive the step read the sequences of `readable` alone; null: all.  Raises ScheduleError
        where the round cannot be carried out.
        """
        late = self.late if decode else ()
        read = {name: [] if name in late else _readable(book, score, readable) for name, book in self.scorers.items()}
        cut = self._cut(decode, read, chunk)
        works: dict[str, list[ReplicaWork]] = {}
        steps = self.actor.steps(decode, chunk)
        if decode:
            works["actor"] = self.actor.plan(decode, steps, cut.micro_batches, self.micro_batch_tokens, order)
        if score:
            works |= {name: book.plan(read[name], cut.prefill_tokens) for name, book in self.scorers.items()}
        actor = works.get("actor", [])
        round_ = Round(
            index,
            steps,
            tuple(tuple(work.decode) for work in actor),
            {name: tuple(tuple(w.prefill) for w in replicas) for name, replicas in works.items()},
        )
        budgets = self._budgets(works)
        require_room(round_, budgets)
        return PlannedRound(round_, works, self._schedule(round_, budgets))

    def learn(self, costs: Costs) -> None:
        """Plan by `costs` from now on.  All ranks do so between the same two rounds."""
        self.costs = costs
        self._known.clear()
        self._cuts.clear()

    def reset_perishable(self) -> list[str]:
        """Scorers that are trained have other weights: what they have computed is stale.  Returns their names."""
        stale = [name for name, book in self.scorers.items() if book.perishable]
        for name in stale:
            self.scorers[name].reset()
        return stale

    def _cut(self, decode: Sequence[Rollout], read: Mapping[str, Sequence[Rollout]], chunk: int) -> Cut:
        """Decode micro-batches of each replica, and the token budget of a scorer's prefill micro-batch."""
        (micro_batches, asked), placement = self.weave, self.site.placements["actor"]
        tokens = None if asked == "auto" else min(asked, self.micro_batch_tokens)
        if self.generator != "woven" or placement.pp == 1:
            return Cut(1 if micro_batches == "auto" else micro_batches, tokens or self.micro_batch_tokens)
        decoding = set(placement.ranks)
        beside = [name for name in self.scorers if decoding & set(self.site.placements[name].ranks)]
        pending = {name: self.scorers[name].pending(read[name]) for name in beside}
        growths = [new for replicas in pending.values() for news in replicas for new in news]
        work = Work(
            num_sequences=_coarse(max(self.actor.running(decode))),
            steps=_coarse(self.actor.steps(decode, chunk)),
            pp=placement.pp,
            prefill_tokens={name: _coarse(max(map(sum, replicas))) for name, replicas in pending.items()},
        )
        grain = _coarse(int(median(growths))) if growths else 1
        key = (work.num_sequences, work.steps, *work.prefill_tokens.items(), grain)
        if key not in self._cuts:
            wanted = None if micro_batches == "auto" else micro_batches
            self._cuts[key] = choose_cut(
                work, self.costs, self.micro_batch_tokens, grain=grain, micro_batches=wanted, prefill_tokens=tokens
            )
        return self._cuts[key]

    def _schedule(self, round_: Round, budgets: Mapping[str, Sequence[KVBudget]]) -> Schedule:
        """The schedule of the round's shape: sizes of micro-batches do not change what has to be done in which order.

        It is checked once: what sizes decide, `require_room` has seen.
        """
        counts = tuple((name, tuple(map(len, replicas))) for name, replicas in sorted(round_.prefill.items()))
        key = (round_.steps, tuple(map(len, round_.decode)), counts)
        if key not in self._known:
            if len(self._known) >= KEPT_SCHEDULES:
                self._known.clear()
            shape = Round(1, round_.steps, round_.decode, round_.prefill)
            if self.rank is not None:
                shape = component(shape, self.site, self.rank)
            schedule = GENERATORS[self.generator](shape, self.site, self.costs)
            schedule = add_communication(schedule, shape, self.site)
            require_sound(schedule, shape, self.site, budgets, self.costs)
            self._known[key] = schedule
        return self._known[key]

    def _budgets(self, works: Mapping[str, Sequence[ReplicaWork]]) -> dict[str, list[KVBudget]]:
        """What each cache can hold, and how much of it sequences have that the round leaves alone."""
        books: dict[str, Book] = {"actor": self.actor, **self.scorers}
        return {
            name: [
                KVBudget(books[name].slots, self.max_length, books[name].num_open(d) - len(_grown(work)))
                for d, work in enumerate(replicas)
            ]
            for name, replicas in works.items()
        }


def _readable(book: ScoringBook, score: Sequence[Rollout], readable: Set[int] | None) -> Sequence[Rollout]:
    return [r for r in score if r.seq_id in readable] if readable is not None and book.perishable else score


def _grown(work: ReplicaWork) -> set[int]:
    """Sequences of a replica that grow in the round and keep their slots beyond it."""
    return {growth.seq_id for batch in (*work.prefill, *work.decode) for growth in batch} - set(work.done)


def _coarse(number: int) -> int:
    """Rounded up to three binary digits: rounds of about the same size are cut alike, and the cut is sought once."""
    unit = 1 << max(0, number.bit_length() - 3)
    return -(-number // unit) * unit
