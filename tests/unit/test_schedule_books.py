"""The books of what each role has cached: against a plain dictionary of caches that does what they plan."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.book import ReplicaWork
from oppo_megatron.schedule.planning.scoring_book import ScoringBook
from oppo_megatron.schedule.rounds import Growth

ROLES = ("reward", "reference", "critic")
BUDGET = 12


def rollout(seq_id: int, num_prompt: int, num_response: int = 0, finished: bool = False) -> Rollout:
    made = Rollout(Prompt(seq_id, seq_id, "", tuple(range(num_prompt))), seq_id, tokens=list(range(num_response)))
    made.finish_clock = 1 if finished else None
    return made


@dataclass
class Fleet:
    num_replicas: int
    slots: int
    book: ScoringBook = field(init=False)
    held: dict[int, Rollout] = field(default_factory=dict)
    placed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.book = ScoringBook("critic", self.num_replicas, self.slots)

    def on(self, replica: int) -> list[Rollout]:
        return [r for i, r in self.held.items() if i in self.placed and self.book.replica(i) == replica]

    def tokens(self, replica: int) -> int:
        return sum(r.num_tokens for r in self.on(replica))

    def arrive(self, *new: Rollout) -> list[int]:
        self.held |= {r.seq_id: r for r in new}
        self.book.place(list(self.held.values()))
        self.placed = set(self.held)
        return [self.book.replica(r.seq_id) for r in new]

    def leave(self, seq_id: int) -> None:
        del self.held[seq_id]
        self.placed.remove(seq_id)
        self.book.forget(seq_id, unread=True)


@settings(max_examples=200)
@given(num_replicas=st.integers(1, 4), slots=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_a_new_sequence_goes_where_the_fewest_tokens_are(num_replicas: int, slots: int, seed: int) -> None:
    rng, fleet = random.Random(seed), Fleet(num_replicas, slots)
    for seq_id in range(30):
        for own in fleet.held.values():
            own.tokens.extend([0] * rng.randint(0, 3) * (not own.finished))
            own.finish_clock = 1 if own.finished or rng.random() < 0.1 else None
        for i in [i for i in fleet.held if rng.random() < 0.2]:
            fleet.leave(i)
        homes = {i: fleet.book.replica(i) for i in fleet.held}
        free = [d for d in range(num_replicas) if len(fleet.on(d)) < slots]
        lasting = [d for d in range(num_replicas) if sum(not r.finished for r in fleet.on(d)) < slots]
        loads = [(fleet.tokens(d), len(fleet.on(d)), d) for d in range(num_replicas)]
        (found,) = fleet.arrive(rollout(seq_id, rng.randint(1, 9)))
        if both := [d for d in lasting if d in free]:
            assert loads[found] == min(loads[d] for d in both)
        assert found in (both or lasting or range(num_replicas))
        assert homes == {i: fleet.book.replica(i) for i in homes}, "a sequence stays where it is"


@given(num_replicas=st.integers(1, 4), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_arrivals_are_balanced_by_tokens(num_replicas: int, lengths: list[int], seed: int) -> None:
    """Longest first: no replica is ahead of another by more than its shortest; and every rank finds the same."""
    fleet, same = Fleet(num_replicas, 100), Fleet(num_replicas, 100)
    arrivals = [rollout(i, n) for i, n in enumerate(lengths)]
    assert fleet.arrive(*arrivals) == same.arrive(*arrivals)
    least = min(fleet.tokens(d) for d in range(num_replicas))
    for replica in range(num_replicas):
        shortest = min((r.num_tokens for r in fleet.on(replica)), default=0)
        assert fleet.tokens(replica) - shortest <= least


def test_by_tokens_is_not_by_number() -> None:
    fleet = Fleet(2, 8)
    assert fleet.arrive(rollout(0, 40), rollout(1, 10), rollout(2, 10), rollout(3, 10)) == [0, 1, 1, 1]
    fleet.held[1].tokens[:] = [0] * 20  # responses count
    assert fleet.arrive(rollout(4, 5)) == [0]
    fleet = Fleet(2, 3)  # a batch that has ended is divided within the slots
    fleet.arrive(rollout(0, 60, finished=True), *(rollout(i, 5, finished=True) for i in range(1, 6)))
    assert [len(fleet.on(d)) for d in (0, 1)] == [3, 3]


@dataclass
class Caches:
    role: str
    replicas: int
    slots: int
    of_steps: bool = False
    lengths: list[dict[int, int]] = field(default_factory=list)
    outputs: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # positions, in order
    read: Counter[tuple[int, int]] = field(default_factory=Counter)  # (sequence, position) -> times prefilled
    evicted: list[int] = field(default_factory=list)
    home: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lengths = [{} for _ in range(self.replicas)]

    def carry_out(self, works: list[ReplicaWork], rollouts: dict[int, Rollout]) -> None:
        for replica, (cache, work) in enumerate(zip(self.lengths, works, strict=True)):
            for seq_id in work.evict:
                assert seq_id == max(i for i in cache if not rollouts[i].finished), "the youngest makes room"
                del cache[seq_id]
                self.evicted.append(seq_id)
            for seq_id in work.open:
                assert cache.setdefault(seq_id, 0) == 0 and seq_id not in work.evict
            if work.evict:
                assert len(cache) == self.slots and len(work.evict) <= sum(rollouts[i].finished for i in work.open)
            assert len(cache) <= self.slots and not work.decode
            assert all(sum(g.new for g in batch) <= BUDGET or len(batch) == 1 for batch in work.prefill)
            grown = [growth for batch in work.prefill for growth in batch]
            assert len(grown) == len({growth.seq_id for growth in grown})
            for growth in grown:
                self._grow(replica, growth, rollouts[growth.seq_id])
            assert work.done == [i for i in work.done if rollouts[i].finished]
            for seq_id in work.done:
                del cache[seq_id]
            assert not any(rollouts[i].finished for i in cache), "a finished sequence gives up its slot"

    def _grow(self, replica: int, growth: Growth, rollout: Rollout) -> None:
        cache, seq_id = self.lengths[replica], growth.seq_id
        assert self.home.setdefault(seq_id, replica) == replica
        assert growth.past == cache[seq_id] and growth.new > 0 and 0 <= growth.rows <= growth.new
        end = growth.past + growth.new
        assert end == rollout.num_tokens - (self.role != "reward")
        cache[seq_id] = end
        self.read.update((seq_id, position) for position in range(growth.past, end))
        self.outputs[seq_id] += range(end - growth.rows, end)

    def owed(self, rollout: Rollout) -> list[int]:
        num_prompt = len(rollout.prompt.tokens)
        if self.of_steps:
            return list(range(num_prompt, rollout.num_tokens))
        if self.role == "reward":
            return [rollout.num_tokens - 1] if rollout.finished else []
        return list(range(num_prompt - 1, rollout.num_tokens - 1))


class Life:
    """Rollouts that arrive, grow by random chunks, finish, are trained when all is scored."""

    def __init__(self, seed: int):
        self.random, self.rollouts, self.ends = random.Random(seed), dict[int, Rollout](), dict[int, int]()
        self.known: dict[int, Rollout] = {}
        self.next_id = 0

    def arrive(self) -> None:
        for _ in range(self.random.choice([0, 1, 1, 2, 4])):
            self.rollouts[self.next_id] = self.known[self.next_id] = rollout(self.next_id, self.random.randint(1, 6))
            self.ends[self.next_id] = self.random.randint(1, 9)
            self.next_id += 1

    def grow(self) -> None:
        for seq_id, own in self.rollouts.items():
            if not own.finished:
                own.tokens[:] = list(range(min(self.ends[seq_id], len(own.tokens) + self.random.choice([0, 1, 2, 5]))))
                own.finish_clock = 1 if len(own.tokens) == self.ends[seq_id] else None

    def listed(self) -> list[Rollout]:
        return self.random.sample(list(self.rollouts.values()), len(self.rollouts))


@settings(max_examples=150)
@given(role=st.sampled_from((*ROLES, "process")), replicas=st.integers(1, 3), slots=st.integers(1, 5), seed=st.integers(0, 10**6))
def test_scorers_read_and_give_exactly_what_is_there(role: str, replicas: int, slots: int, seed: int) -> None:
    of_steps, role = role == "process", "reward" if role == "process" else role
    book, life = ScoringBook(role, replicas, slots, every_token=of_steps), Life(seed)
    caches = Caches(role, replicas, slots, of_steps=of_steps)
    reset_at = life.random.randint(0, 12) if role == "critic" else None
    for index in range(12):
        life.arrive()
        life.grow()
        rollouts = life.listed()
        homes, news = book.pending(rollouts)
        wanted = [{r.seq_id for r in rollouts if book.replica(r.seq_id) == d and book.owes([r])} for d in range(replicas)]
        roomy = all(len(want | set(cache)) <= slots for want, cache in zip(wanted, caches.lengths, strict=True))
        works = book.plan(rollouts, BUDGET)
        caches.carry_out(works, life.known)
        if roomy:
            planned = [sorted(g.new for batch in work.prefill for g in batch) for work in works]
            assert planned == [sorted(news[homes == replica]) for replica in range(replicas)]
            assert not book.owes(rollouts) and not any(work.evict for work in works)
        for own in rollouts:
            got, owed = caches.outputs[own.seq_id], caches.owed(own)
            assert got == owed[: len(got)]
            cached = caches.lengths[book.replica(own.seq_id)].get(own.seq_id, 0)
            assert book.owes([own]) == (got != owed if own.finished else cached < own.num_tokens - (role != "reward"))
        if index == reset_at:
            book.reset()
            caches = Caches(role, replicas, slots, home=caches.home)
        train(life, book, caches)
    # Let everything end: each round scores at least one sequence of every replica that has any
    while life.rollouts:
        for own in life.rollouts.values():
            own.tokens[:], own.finish_clock = list(range(life.ends[own.seq_id])), 1
        before = len(life.rollouts)
        caches.carry_out(book.plan(life.listed(), BUDGET), life.known)
        train(life, book, caches)
        assert len(life.rollouts) < before
    assert all(not cache for cache in caches.lengths)
    if not caches.evicted:
        assert set(caches.read.values()) <= {1}, "every token is prefilled once"


def train(life: Life, book: ScoringBook, caches: Caches) -> None:
    for seq_id, own in list(life.rollouts.items()):
        if own.finished and not book.owes([own]):
            assert caches.outputs[seq_id] == caches.owed(own)
            last = own.num_tokens - (caches.role != "reward")
            assert {p for i, p in caches.read if i == seq_id} == set(range(last))
            book.forget(seq_id)
            del life.rollouts[seq_id]


def test_new_weights_make_everything_owed_again_and_a_sequence_that_is_given_up_leaves_its_slot() -> None:
    book = ScoringBook("critic", 1, 4)
    surplus, running = rollout(0, 3, 4, finished=True), rollout(1, 2, 3)
    book.plan([surplus, running], 100)
    assert not book.owes([surplus, running])
    book.reset()
    (work,) = book.plan([surplus, running], 100)
    assert work.open == [0, 1] and work.evict == []
    assert work.prefill == [(Growth(0, 0, 6, 4), Growth(1, 0, 4, 3))]
    book = ScoringBook("reward", 2, 1)
    half_read, waiting, unknown = (rollout(i, 2, 1) for i in (0, 1, 2))
    book.plan([half_read, waiting], BUDGET)
    assert [book.num_open(replica) for replica in (0, 1)] == [1, 1]
    with pytest.raises(AssertionError, match="reward: sequence 0 was trained unscored"):
        book.forget(half_read.seq_id)
    book.forget(half_read.seq_id, unknown.seq_id, unread=True)
    assert [book.num_open(replica) for replica in (0, 1)] == [0, 1]
    assert book.state_dict()["replicas"] == [(1, 1)] and book.state_dict()["outputs"] == []
    works = book.plan([waiting, unknown], BUDGET)
    assert [work.open for work in works] == [[2], []], "its place is free"


@settings(max_examples=150)
@given(*(st.integers(1, most) for most in (3, 5, 4, 6)), st.integers(0, 10**6))
def test_the_actor_decodes_what_it_holds(replicas: int, slots: int, micro_batches: int, chunk: int, seed: int) -> None:
    rng, life = random.Random(seed), Life(seed)
    limits: dict[int, int] = defaultdict(lambda: rng.randint(1, 12))
    book, caches = ActorBook(replicas, slots, limits.__getitem__), [dict[int, int]() for _ in range(replicas)]
    for _ in range(10):
        life.arrive()
        active = [r for r in life.rollouts.values() if not r.finished]
        asked = book.active(active)
        steps, running = book.steps(asked, chunk), book.running(asked)
        assert steps == min([chunk, max([limits[r.seq_id] - len(r.tokens) for r in active], default=0)])
        order = sorted(life.rollouts, key=lambda i: rng.random())
        works = book.plan(active, steps, micro_batches, BUDGET, lambda ids, o=order: sorted(ids, key=o.index))
        for replica, work in enumerate(works):
            held = list(caches[replica])
            check_actor_work(book, work, replica, caches[replica], life.rollouts, slots)
            planned = [g for batch in work.decode for g in batch]
            assert len(planned) == running[replica] and len(work.decode) == min(micro_batches, len(planned))
            sizes = [len(batch) for batch in work.decode]
            assert not sizes or max(sizes) - min(sizes) <= 1
            assert [g.seq_id for g in planned] == sorted(held, key=order.index) + work.open
            for growth in planned:
                own = life.rollouts[growth.seq_id]
                assert growth.new == min(steps, limits[growth.seq_id] - len(own.tokens))
                own.tokens.extend([0] * rng.randint(1, growth.new))
                own.finish_clock = 1 if len(own.tokens) == limits[growth.seq_id] or rng.random() < 0.2 else None
                caches[replica][growth.seq_id] = own.num_tokens - 1
                if own.finished:
                    del caches[replica][growth.seq_id]
        book.record(active)
        if rng.random() < 0.3:
            book.invalidate()
            caches = [dict.fromkeys(cache, 0) for cache in caches]


def check_actor_work(
    book: ActorBook, work: ReplicaWork, replica: int, cache: dict[int, int], rollouts: dict[int, Rollout], slots: int
) -> None:
    """Carry out a replica's prefill in `cache`; then every running sequence has all but its last token."""
    waiting = [i for i, r in rollouts.items() if not r.finished and book.replica(i) == replica and i not in cache]
    assert work.open == waiting[: slots - len(cache)], "those admitted first run"
    assert work.evict == work.done == []
    for seq_id in work.open:
        cache[seq_id] = 0
    assert len(cache) <= slots
    for batch in work.prefill:
        assert sum(g.new for g in batch) <= BUDGET or len(batch) == 1
        for growth in batch:
            assert growth.past == cache[growth.seq_id] and growth.new > 0 and growth.rows == 0
            cache[growth.seq_id] += growth.new
    for growth in (g for batch in work.decode for g in batch):
        assert growth.past == cache[growth.seq_id] == rollouts[growth.seq_id].num_tokens - 1


def test_a_cache_that_is_kept_is_as_old_as_its_first_tokens() -> None:
    book, held = ActorBook(1, 4, lambda _: 9), [rollout(i, 3) for i in range(2)]

    def decode(*rollouts: Rollout) -> None:
        book.plan(rollouts, 1, 1, BUDGET, list)
        for each in rollouts:
            each.tokens.append(7)
        book.record(rollouts)

    decode(held[0])
    assert book.outlived == {}
    book.keep()
    decode(*held)
    assert book.outlived == {0: 1}, "the other was begun by the new weights"
    book.keep()
    assert book.outlived == {0: 2, 1: 1}
    resumed = ActorBook(1, 4, lambda _: 9)
    resumed.load_state_dict(book.state_dict())
    assert resumed.outlived == book.outlived
    held[0].finish_clock = 3
    decode(*held)
    assert book.outlived == {1: 1}, "what has ended has no cache"
    book.invalidate()
    book.keep()
    assert book.outlived == {}, "what is computed again is by the new weights"


def test_replicas_that_lost_sequences_get_the_next_ones() -> None:
    book = ActorBook(2, 8, lambda _: 9)
    first = [rollout(i, 2) for i in range(4)]
    book.plan(first, 3, 1, BUDGET, list)
    assert [book.replica(i) for i in range(4)] == [0, 1, 0, 1]
    for done in (first[1], first[3]):
        done.tokens[:], done.finish_clock = [1], 1
    for going_on in (first[0], first[2]):
        going_on.tokens[:] = [1, 2, 3]
    book.record(first)
    assert book.running(book.active([first[0], first[2], rollout(4, 2), rollout(5, 2)])) == [2, 2]
    assert [book.replica(i) for i in (4, 5)] == [1, 1]
