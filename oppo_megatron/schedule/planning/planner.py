"""Plans rounds: the work of each replica (books), micro-batches (cut) and order of actions (schedule); the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from oppo_megatron.columns import Ints, columns_of
from oppo_megatron.cores import uncollected
from oppo_megatron.errors import ScheduleError
from oppo_megatron.records import Rollout
from oppo_megatron.schedule.actions import Action, Schedule
from oppo_megatron.schedule.checking.caches import Budgets, require_room
from oppo_megatron.schedule.checking.checker import require_sound
from oppo_megatron.schedule.checking.proof import prove, require_provable
from oppo_megatron.schedule.links import GLOO, Transport
from oppo_megatron.schedule.planning.actor_book import Active, ActorBook
from oppo_megatron.schedule.planning.book import Book, ReplicaWork
from oppo_megatron.schedule.planning.scoring_book import ScoringBook, Unread
from oppo_megatron.schedule.rounds import KVBudget, Round, Site
from oppo_megatron.schedule.weaving.components import add_communication, component_of
from oppo_megatron.schedule.weaving.costs import Costs
from oppo_megatron.schedule.weaving.cut import Cut, Work, choose_cut
from oppo_megatron.schedule.weaving.generators import CustomGenerator, Generator, generator_of, intra, one_by_one

KEPT_SCHEDULES = 256  # by shapes of rounds
KEPT_CUTS = 1024

Order = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True)
class PlannedRound:
    """One schedule serves all rounds of the same shape, so its chunks count from 1 (`Schedule.shifted`)."""

    round: Round
    works: Mapping[str, Sequence[ReplicaWork]]
    schedule: Schedule

    @property
    def steps(self) -> int:
        return self.round.steps


@dataclass
class RoundPlanner:
    """Plans the `Component` of `rank` (None: all ranks); scorers in `late` skip rounds that decode."""

    site: Site
    generator: str
    weave: Sequence[int | Literal["auto"]]  # decode micro-batches, and tokens of a prefill micro-batch
    micro_batch_tokens: int
    max_length: int  # tokens of a cached sequence
    actor: ActorBook
    scorers: Mapping[str, ScoringBook]
    costs: Costs = Costs()
    rank: int | None = None
    late: Set[str] = frozenset()
    transport: Transport = GLOO
    _known: dict[tuple[object, ...], Schedule] = field(default_factory=dict)
    _cuts: dict[tuple[object, ...], Cut] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._generate = generator_of(self.generator)
        self._component = None if self.rank is None else component_of(self.site, self.rank)

    @uncollected()
    def plan(
        self, index: int, decode: Sequence[Rollout], score: Sequence[Rollout], chunk: int, order: Order,
        readable: Ints | None = None,
    ) -> PlannedRound:  # fmt: skip
        """Plan to decode up to `chunk` tokens and score new ones (critic: only `readable`; None: all). Raises ScheduleError."""
        round_, works = self.book(index, decode, score, chunk, order, readable)
        budgets = self._budgets(works)
        require_room(round_, budgets)
        ours = {name: list(own.values()) for name, own in budgets.items()}
        return PlannedRound(round_, works, self._schedule(round_, ours))

    @uncollected()
    def book(
        self, index: int, decode: Sequence[Rollout], score: Sequence[Rollout], chunk: int, order: Order,
        readable: Ints | None = None,
    ) -> tuple[Round, dict[str, list[ReplicaWork]]]:  # fmt: skip
        """Return a round and its work by role and replica; the books count all of it as done."""
        active, unread = self.actor.active(decode), dict[str, Unread]()
        scored = some = columns_of(score)
        perishable = any(book.perishable for book in self.scorers.values())
        if perishable and readable is not None and not np.array_equal(readable, scored.seq_ids):
            some = scored.at(np.isin(scored.seq_ids, readable))
        for name, book in self.scorers.items():
            late = decode and name in self.late
            unread[name] = book.unread(scored.at(slice(0)) if late else some if book.perishable else scored)
        steps = self.actor.steps(active, chunk)
        cut = self._cut(active, unread, steps)
        works: dict[str, list[ReplicaWork]] = {}
        if decode:
            works["actor"] = self.actor.plan(active, steps, cut.micro_batches, self.micro_batch_tokens, order, self._own("actor"))
        if score:
            works |= {n: book.plan(unread[n], cut.prefill_tokens, self._own(n)) for n, book in self.scorers.items()}
        forks = {name: tuple(tuple(work.fork) for work in own) for name, own in works.items() if any(w.fork for w in own)}
        prefill = {name: tuple(work.prefill for work in own) for name, own in works.items()}
        return Round(index, steps, tuple(work.decode for work in works.get("actor", [])), prefill, forks), works

    def owes(self, rollouts: Sequence[Rollout]) -> bool:
        columns = columns_of(rollouts)
        return any(book.owes(columns) for book in self.scorers.values())

    @property
    def forked_tokens(self) -> int:
        return sum(book.forked_tokens for book in (self.actor, *self.scorers.values()))

    @property
    def prefilled_tokens(self) -> int:
        return sum(book.prefilled_tokens for book in (self.actor, *self.scorers.values()))

    def learn(self, costs: Costs) -> None:
        """Plan by `costs` from now on; every rank must do so after the same round."""
        self.costs = costs
        self._known.clear()
        self._cuts.clear()

    def reset_perishable(self) -> list[str]:
        stale = [name for name, book in self.scorers.items() if book.perishable]
        for name in stale:
            self.scorers[name].reset()
        return stale

    def _own(self, role: str) -> tuple[int, ...] | None:
        return None if self._component is None else self._component.replicas.get(role, ())

    def _cut(self, decode: Active, unread: Mapping[str, Unread], steps: int) -> Cut:
        (micro_batches, asked), placement = self.weave, self.site.placements["actor"]
        tokens = None if asked == "auto" else min(asked, self.micro_batch_tokens)
        if self.generator != "woven" or placement.pp == 1:
            return Cut(1 if micro_batches == "auto" else micro_batches, tokens or self.micro_batch_tokens)
        placements = self.site.placements
        shared = [name for name in self.scorers if not set(placements[name].ranks).isdisjoint(placement.ranks)]
        pending = {name: self.scorers[name].pending(unread[name]) for name in shared}
        growths = np.concatenate([news for _, news in pending.values()]) if pending else np.zeros(0, dtype=np.int64)
        work = Work(
            num_sequences=_coarse(max(self.actor.running(decode))),
            steps=_coarse(steps),
            pp=placement.pp,
            prefill_tokens={name: _coarse(int(np.bincount(*each).max(initial=0))) for name, each in pending.items()},
        )
        grain = _coarse(int(np.median(growths))) if len(growths) else 1
        key = (work.num_sequences, work.steps, *work.prefill_tokens.items(), grain)
        if key not in self._cuts:
            if len(self._cuts) >= KEPT_CUTS:
                self._cuts.clear()
            wanted = None if micro_batches == "auto" else micro_batches
            self._cuts[key] = choose_cut(
                work, self.costs, self.micro_batch_tokens, grain=grain, micro_batches=wanted, prefill_tokens=tokens
            )
        return self._cuts[key]

    def _schedule(self, round_: Round, budgets: Budgets) -> Schedule:
        component = self._component
        shape = replace(round_ if component is None else component.part(round_), index=1)
        prefill = tuple((name, tuple(map(len, replicas))) for name, replicas in sorted(shape.prefill.items()))
        key = shape.steps, tuple(map(len, shape.decode)), prefill
        if key not in self._known:
            site = self.site if component is None else component.model
            computes, rules = self._ordered(shape, site)
            try:
                if component is None:
                    schedule = add_communication(computes, shape, site)
                    require_sound(schedule, shape, site, budgets, self.costs, self.transport)
                else:
                    require_provable(computes, shape, site, budgets, self.costs, rules)
                    schedule = Schedule({component.rank: component.own_list(computes, shape)})
            except ScheduleError as error:
                if not isinstance(self._generate, CustomGenerator):
                    raise
                raise self._generate.plugin.refuse(f"made a schedule that cannot run: {error}", "correct its order") from error
            if len(self._known) >= KEPT_SCHEDULES:
                self._known.clear()
            self._known[key] = schedule
        return self._known[key]

    def _ordered(self, shape: Round, site: Site) -> tuple[Schedule, Transport]:
        """Return compute actions that cannot deadlock if the transport holds sends, and the transport rules left to check."""
        if isinstance(self._generate, CustomGenerator):
            return self._generate(shape, site, self.costs), self.transport
        generator, computes = self._passing(shape, site)
        if self._component is not None or generator is self._generate:
            return computes, self.transport if generator is one_by_one else self.transport.free
        # Each component chooses its own generator, as its ranks would without knowing the others.
        lists, left = dict[int, tuple[Action, ...]](), set(site.ranks)
        while left:
            component = component_of(site, min(left))
            generator, _ = self._passing(component.part(shape), component.model)
            whole = generator(shape, site, self.costs)
            lists |= {rank: whole.of(rank) for rank in component.ranks}
            left -= component.ranks
        return Schedule(lists), self.transport

    def _passing(self, shape: Round, site: Site) -> tuple[Generator, Schedule]:
        for generator in (self._generate, intra):
            computes = generator(shape, site, self.costs)
            if not self.transport.holds or prove(computes, shape, site, self.transport):
                return generator, computes
        return one_by_one, one_by_one(shape, site, self.costs)  # never deadlocks

    def _budgets(self, works: Mapping[str, Sequence[ReplicaWork]]) -> dict[str, dict[int, KVBudget]]:
        books: dict[str, Book] = {"actor": self.actor, **self.scorers}
        budgets: dict[str, dict[int, KVBudget]] = {}
        for name, replicas in works.items():
            book, own = books[name], self._own(name)
            budgets[name] = {
                d: KVBudget(book.slots, self.max_length, book.num_open(d) - replicas[d].num_staying)
                for d in (range(len(replicas)) if own is None else own)
            }
        return budgets


def _coarse(number: int) -> int:
    """Round up to three binary digits, so that similar rounds share a cut."""
    unit = 1 << max(0, number.bit_length() - 3)
    return -(-number // unit) * unit
