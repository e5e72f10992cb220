"""Groups, whose sequences begin with one prompt: their replica, and who forks whose cache; what the checker says to forks."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.errors import ScheduleError
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.checking.caches import require_room
from oppo_megatron.schedule.checking.checker import check
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.book import Grouping, ReplicaWork
from oppo_megatron.schedule.planning.scoring_book import ScoringBook
from oppo_megatron.schedule.rounds import Fork, Forks, Growth, KVBudget, Round
from tests.support.schedules import build, make_site

ROLES = ("reward", "reference", "critic")
BUDGET = 12


def group(first: int, size: int, prompt: int, *responses: int) -> list[Rollout]:
    made = [Rollout(Prompt(i, i, "", (first,) * prompt), i) for i in range(first, first + size)]
    for rollout, length in zip(made, responses, strict=False):
        rollout.tokens[:] = [0] * length
    return made


@given(size=st.integers(2, 4), num_replicas=st.integers(1, 3), groups=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_a_group_has_one_replica_and_no_replica_too_many(size: int, num_replicas: int, groups: int, seed: int) -> None:
    rng, book = random.Random(seed), ScoringBook("critic", num_replicas, groups * size, Grouping(size))
    held: list[Rollout] = []
    late: list[Rollout] = []
    for number in range(0, 16 * size, 2 * size):
        held, late = held + late, []
        if len(held) + 2 * size <= num_replicas * groups * size:
            for first in (number, number + size):
                arrived, cut = group(first, size, rng.randint(1, 9)), rng.randint(1, size)
                held, late = held + arrived[:cut], late + arrived[cut:]
        book.place(held)
        homes = defaultdict(set)
        for rollout in held:
            homes[rollout.seq_id // size].add(book.replica(rollout.seq_id))
        assert all(len(own) == 1 for own in homes.values())
        on = [book.replica(rollout.seq_id) for rollout in held]
        assert max(map(on.count, range(num_replicas))) <= groups * size
        if homes and rng.random() < 0.5 and not late:
            gone = rng.choice(sorted(homes))
            leaving = [r for r in held if r.seq_id // size == gone]
            book.forget(*(r.seq_id for r in leaving), unread=True)
            held = [r for r in held if r not in leaving]


@dataclass
class Cache:
    """One replica's cache that does what a book says: each sequence's tokens, [prompt, position]."""

    held: dict[int, int] = field(default_factory=dict)
    computed: int = 0

    def carry_out(self, work: ReplicaWork, size: int) -> list[Growth]:
        """Prefill; each fork as soon as its source is there.  Returns what has grown."""
        for seq_id in work.evict:
            del self.held[seq_id]
        for seq_id in work.open:
            assert self.held.setdefault(seq_id, 0) == 0
        left = list(work.fork)
        assert all(fork.held == self.held[fork.source] for fork in left)
        for batch in ((), *work.prefill):
            for growth in batch:
                assert self.held[growth.seq_id] == growth.past and growth.new > 0
                self.held[growth.seq_id] += growth.new
                self.computed += growth.new
            for fork in [f for f in left if self.held[f.source] >= f.tokens]:
                assert fork.source // size == fork.target // size and not self.held[fork.target]
                self.held[fork.target] = fork.tokens
                left.remove(fork)
        assert not left
        return [growth for batch in work.prefill for growth in batch]


@settings(max_examples=60)
@given(role=st.sampled_from(ROLES), slots=st.integers(2, 9), seed=st.integers(0, 10**6), fork=st.booleans())
def test_scorers_give_the_same_outputs_and_read_a_prompt_once(role: str, slots: int, seed: int, fork: bool) -> None:
    rng, size = random.Random(seed), 3
    book, cache = ScoringBook(role, 1, slots, Grouping(size, fork)), Cache()
    rollouts = [r for first in (0, 3) for r in group(first, size, rng.randint(1, 5))]
    rows: dict[int, int] = defaultdict(int)
    evicted = False
    while any(not r.finished for r in rollouts) or book.owes(rollouts):
        for own in [r for r in rollouts if not r.finished]:
            new = rng.choice([0, 2, 5])
            own.tokens.extend([0] * new)
            own.finish_clock = 1 if new and rng.random() < 0.4 else None
        before, pending = book.forked_tokens, sum(book.pending(rollouts)[1])
        (work,) = book.plan(rollouts, BUDGET)
        grown = cache.carry_out(work, size)
        assert book.forked_tokens - before == sum(f.tokens for f in work.fork)
        assert book.prefilled_tokens == cache.computed
        evicted = evicted or bool(work.evict)
        if slots >= len(rollouts):
            assert pending == sum(g.new for g in grown)
        for growth in grown:
            rows[growth.seq_id] += growth.rows
        for seq_id in work.done:
            del cache.held[seq_id]
    read = [r.num_tokens - (role != "reward") for r in rollouts]
    assert [rows[r.seq_id] for r in rollouts] == [1 if role == "reward" else len(r.tokens) for r in rollouts]
    if slots >= len(rollouts):
        assert cache.computed == sum(read) - book.forked_tokens
        saved = sum((size - 1) * (len(rollouts[i].prompt.tokens) - (role != "reward")) for i in (0, size))
        assert book.forked_tokens == (saved if fork else 0)
    elif not evicted:
        assert cache.computed <= sum(read)


def actor(slots: int = 9, fork: bool = True) -> ActorBook:
    return ActorBook(1, slots, lambda _: 9, Grouping(3, fork))


def planned(book: ActorBook, active: list[Rollout]) -> ReplicaWork:
    (work,) = book.plan(active, 2, 1, BUDGET, list)
    return work


def test_the_actor_computes_a_prompt_once_and_again_for_new_weights() -> None:
    """The first of stale ones computes all that it has, the others what lies behind the prompt, in a later micro-batch."""
    book, active = actor(), group(3, 3, 5)
    work = planned(book, active)
    assert work.prefill == [(Growth(3, 0, 4),)] and work.fork == [Fork(3, 4, 4), Fork(3, 5, 4)]
    assert [g.past for g in work.decode[0]] == [4, 4, 4]
    for rollout, length in zip(active, (2, 1, 2), strict=True):
        rollout.tokens[:] = [0] * length
    book.record(active)
    assert planned(book, active) == ReplicaWork(decode=[tuple(Growth(i, p, 2) for i, p in ((3, 6), (4, 5), (5, 6)))])
    book.invalidate()
    work = planned(book, active)
    assert work.prefill == [(Growth(3, 0, 6),), (Growth(4, 4, 1), Growth(5, 4, 2))]
    assert work.fork == [Fork(3, 4, 4), Fork(3, 5, 4)] and book.forked_tokens == 16
    # Without forks, and for prompts of one token, everyone computes all.
    assert planned(actor(fork=False), group(0, 3, 5)).prefill == [tuple(Growth(i, 0, 4) for i in range(3))]
    assert planned(actor(), group(0, 3, 1)).fork == []


def test_whoever_has_the_prompt_cached_is_the_source_also_after_a_resume_but_not_a_cache_of_older_weights() -> None:
    """Short slots make the third wait; the first has ended by then, and left."""
    book, active = actor(slots=2), group(0, 3, 5)
    assert [f.target for f in planned(book, active).fork] == [1]
    active[0].tokens[:], active[0].finish_clock = [0, 0], 1
    active[1].tokens[:] = [0, 0]
    book.record(active)
    resumed, kept = actor(slots=2), actor(slots=2)
    for each in (resumed, kept):
        each.load_state_dict(book.state_dict())
    kept.keep()
    for each in (book, resumed):
        work = planned(each, active[1:])
        assert work.open == [2] and work.fork == [Fork(1, 2, 4, held=6)] and work.prefill == []
    work = planned(kept, active[1:])  # of the weights before the update: a response that begins now computes its prompt
    assert work.fork == [] and work.prefill == [(Growth(2, 0, 4),)]
    assert planned(actor(slots=2), active[1:]).fork == [Fork(1, 2, 4)], "without the caches one computes it"


SITE = make_site((1, 1, 1), {"reward": (0, 1, 1, 1)})
SOUND = Round(
    1, 0, (), {"reward": (((Growth(0, 0, 6),), (Growth(1, 4, 2), Growth(2, 4, 1))),)},
    {"reward": ((Fork(0, 1, 4), Fork(0, 2, 4), Fork(7, 8, 3, held=5)),)},
)  # fmt: skip


def told(round_: Round) -> tuple[str, str]:
    try:
        require_room(round_, {"reward": {0: KVBudget(9, 99)}})
        said = ""
    except ScheduleError as error:
        said = str(error)
    return said, " ".join(fault.message for fault in check(build(round_, SITE), round_, SITE, {}))


HOLDS = "sequence 1 at 4 tokens, forked from 4 of sequence 0, but it holds {} of that one by then"
PREFILLS: dict[str, tuple[tuple[tuple[Growth, ...], ...], str]] = {
    "before its source is there": (((Growth(1, 4, 2), Growth(2, 4, 1)), (Growth(0, 0, 6),)), HOLDS.format(0)),
    "in the micro-batch of its source": (((Growth(1, 4, 2), Growth(0, 0, 6)),), HOLDS.format(0)),
    "of more than its source has": (((Growth(0, 0, 3),), (Growth(1, 4, 2),)), HOLDS.format(3)),
    "continued elsewhere": (((Growth(0, 0, 6),), (Growth(1, 5, 2),)),
        "sequence 1 at 5 tokens, but it holds 4 of it, forked from sequence 0"),
}  # fmt: skip
FORKS: dict[str, tuple[tuple[Fork, ...], str]] = {
    "of a cache that is never read": ((Fork(0, 1, 4), Fork(0, 2, 4), Fork(7, 8, 3)),
        "fork sequence 8, forked from 3 of sequence 7, but it holds 0 of that one by then"),
    "twice": ((Fork(0, 1, 4), Fork(0, 1, 4)), "twice"),
    "of a fork": ((Fork(0, 1, 4), Fork(1, 2, 4)), "onto one that others are forked from"),
    "of a source that holds something else": ((Fork(0, 1, 4, held=2), Fork(0, 2, 4, held=2)),
        "holds 2 tokens of sequence 0, which is to be continued at 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*PREFILLS, *FORKS])
def test_a_fork_with_a_fault_is_refused(name: str) -> None:
    assert told(SOUND) == ("", "")
    key, (batches, message) = ("prefill", PREFILLS[name]) if name in PREFILLS else ("forks", FORKS[name])
    assert all(message in each for each in told(replace(SOUND, **{key: {"reward": (batches,)}})))


@pytest.mark.parametrize("fork", [True, False])
def test_a_scorer_that_does_not_read_greedy_sequences_gives_them_no_slot(fork: bool) -> None:
    """Two groups of two and a greedy one each, on two replicas that have slots for two: only the reward reads all."""
    rollouts = [*group(0, 3, 4, 2, 3, 9), *group(3, 3, 5, 1, 1, 9)]
    groups, greedy = Grouping(3, fork, greedy=True), {2, 5}
    reference = ScoringBook("reference", 2, 2, groups, reads_greedy=False)
    reward = ScoringBook("reward", 2, 3, groups)
    read: dict[str, set[int]] = {}
    for book in (reference, reward):
        works = book.plan(rollouts, BUDGET)
        grown = [growth for work in works for batch in work.prefill for growth in batch]
        read[book.role] = {growth.seq_id for growth in grown}
        assert all(len({growth.seq_id // 3 for batch in work.prefill for growth in batch}) == 1 for work in works)
        assert not any(work.evict for work in works)
    assert read == {"reference": {0, 1, 3, 4}, "reward": {0, 1, 2, 3, 4, 5}}
    assert sum(reference.pending(rollouts)[1]) == 0
    for rollout in rollouts:
        rollout.tokens.extend([0])
        rollout.finish_clock = 1
    assert reference.owes(rollouts) and not reference.owes([r for r in rollouts if r.seq_id in greedy])
    assert reward.owes([r for r in rollouts if r.seq_id in greedy])
    reference.plan(rollouts, BUDGET)
    assert not reference.owes(rollouts)
    reference.forget(*(r.seq_id for r in rollouts))


def test_a_fork_is_made_once_as_soon_as_its_source_has_enough() -> None:
    forks = Forks([Fork(1, 2, 5), Fork(1, 3, 8), Fork(4, 5, 2)])
    assert forks.due(1, 4) == [] and forks.due(9, 99) == []
    assert forks.due(1, 5) == [Fork(1, 2, 5)] and sorted(forks.sources) == [1, 4]
    assert forks.due(1, 9) == [Fork(1, 3, 8)] and forks.due(1, 9) == [] and forks.sources == [4]
