"""Packing by token budget and dividing among replicas; caches that must hold a round; the chunk that replicas make together."""

import gc
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oppo_megatron.chunks import Chunk, ChunkRow, merge_rows
from oppo_megatron.errors import ScheduleError
from oppo_megatron.overcommit.ahead import Readiness
from oppo_megatron.schedule.checking.caches import require_room
from oppo_megatron.schedule.checking.checker import FaultKind, check
from oppo_megatron.schedule.packing import Packing, balance, dealt, pack_by_tokens, packed_in_order, packing_figures
from oppo_megatron.schedule.planning.book import packed
from oppo_megatron.schedule.planning.planner import PlannedRound
from oppo_megatron.schedule.rounds import Growth, Growths, KVBudget, Round, Site, joined, sums
from oppo_megatron.schedule.weaving import generators
from oppo_megatron.schedule.weaving.generators import GENERATORS
from tests.support.schedules import build, make_site
from tests.unit.test_schedule_planner import SITES, Run, filled, new_planner, shape


def test_first_fit_decreasing_and_longest_processing_time_first_by_hand() -> None:
    assert pack_by_tokens([3, 7, 2, 5, 5, 1], budget=8) == [[1, 5], [3, 0], [4, 2]]
    assert pack_by_tokens([1, 20, 0, 9], budget=10) == [[1], [3, 0, 2]], "an item longer than the budget is alone"
    assert pack_by_tokens([], budget=4) == []
    assert balance([3, 7, 2, 5, 5, 1], 2) == [[0, 1, 2], [3, 4, 5]]
    assert balance([4, 4, 4], 3) == [[0], [1], [2]]
    assert balance([0, 0, 9], 2) == [[2], [0, 1]]
    assert balance([], 2) == [[], []]
    for our_own_bug in (lambda: pack_by_tokens([1], budget=0), lambda: balance([1], 0)):
        with pytest.raises(AssertionError, match="not 0"):
            our_own_bug()


def one_by_one(lengths: list[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = (b for b in bins if sum(lengths[i] for i in b) + lengths[item] <= budget)
        if (found := next(fits, None)) is None:
            bins.append(found := [])
        found.append(item)
    return bins


@given(lengths=st.lists(st.integers(0, 60), max_size=60), budget=st.integers(1, 50))
def test_properties(lengths: list[int], budget: int) -> None:
    bins = pack_by_tokens(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(bins)
    assert [own.tolist() for own in packed_in_order(np.array(lengths, dtype=np.int64), budget)] == [sorted(b) for b in bins]
    loads = [sum(lengths[i] for i in b) for b in bins]
    for members, load in zip(bins, loads, strict=True):
        assert load <= budget or len(members) == 1
    # First fit leaves no two bins that would go into one.
    assert all(a + b > budget for a, b in combinations(loads, 2))
    assert bins == one_by_one(lengths, budget)


@given(lengths=st.lists(st.integers(0, 60), max_size=40), num_parts=st.integers(1, 9))
def test_balance_properties(lengths: list[int], num_parts: int) -> None:
    parts = balance(lengths, num_parts)
    assert len(parts) == num_parts and all(part == sorted(part) for part in parts)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert len(lengths) < num_parts or all(parts)
    loads = [sum(lengths[i] for i in part) for part in parts]
    # No part is ahead of another by more than the last item it took, which is its shortest.
    for part, load in zip(parts, loads, strict=True):
        assert not part or load - min(lengths[i] for i in part) <= min(loads)
    assert parts == balance(tuple(lengths), num_parts)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7), num_parts=st.integers(1, 3))
def test_balance_is_near_the_best_division(lengths: list[int], num_parts: int) -> None:
    best = min(
        max(sum(n for n, part in zip(lengths, choice, strict=True) if part == p) for p in range(num_parts))
        for choice in product(range(num_parts), repeat=len(lengths))
    )
    found = max(sum(lengths[i] for i in part) for part in balance(lengths, num_parts))
    assert 3 * num_parts * found <= (4 * num_parts - 1) * best, "Graham's bound: 4/3 - 1/(3m)"


def test_figures_by_hand() -> None:
    """Bins of 8: [7], [3, 2] on one replica, [5, 1], [5] on the other."""
    packing = Packing.of([[3, 7, 2], [5, 5, 1]], budget=8)
    assert packing == Packing(tokens=23, room=4 * 8, padded=6 * 7)
    assert packing_figures([packing]) == {"packing_efficiency": 23 / 32, "padding_saved": pytest.approx(1 - 23 / 42)}
    assert Packing.of([[3, 20]], budget=8).room == 8 + 20, "a sequence longer than the budget fills its micro-batch"
    whole = Packing.of([[8], []], budget=8)
    assert packing_figures([whole]) == {"packing_efficiency": 1.0, "padding_saved": 0.0}
    assert packing_figures([packing, whole]) == {"packing_efficiency": 31 / 40, "padding_saved": pytest.approx(1 - 31 / 50)}


Part = tuple[int, int, int]


def one_after_the_other(parts: Sequence[Part], slots: int, arrivals: Sequence[Part], most: int) -> list[int]:
    """Each to the least crowded part, then to the one with the fewest tokens; those with slots for a whole group come first."""
    held, found = [list(part) for part in parts], []
    for arrival in arrivals:
        whole = [d for d, (_, sequences, _) in enumerate(held) if sequences + most <= slots]

        def rank(d: int, arrival: Part = arrival) -> tuple[int, ...]:
            (tokens, sequences, unfinished), (_, more, running) = held[d], arrival
            return max(0, unfinished + running - slots), max(0, sequences + more - slots), tokens, sequences, d

        found.append(min(whole, key=lambda d: (held[d][0], held[d][1], d)) if whole else min(range(len(held)), key=rank))
        held[found[-1]] = [own + more for own, more in zip(held[found[-1]], arrival, strict=True)]
    return found


@settings(max_examples=150)
@given(st.integers(1, 9), st.integers(1, 4), st.floats(0.3, 1.5), st.booleans(), st.integers(0, 10**6))
def test_dealing_is_dealing_one_after_the_other(replicas: int, size: int, scarce: float, many: bool, seed: int) -> None:
    rng = random.Random(seed)
    counts = [rng.randint(0, 6) for _ in range(replicas)]
    parts = [(sum(rng.randint(1, 40) for _ in range(n)), n, rng.randint(0, n)) for n in counts]
    number = rng.randint(0, 300 if many else 40)
    sizes = [rng.randint(1, size) for _ in range(number)]
    arrivals = [(rng.choice((7, 7, rng.randint(1, 300))), n, rng.randint(0, n)) for n in sizes]
    slots = max(1, int(scarce * (sum(counts) + sum(sizes)) / replicas))
    asked = np.array(parts, dtype=np.int64).T, slots, np.array(arrivals, dtype=np.int64).reshape(-1, 3).T, size
    assert dealt(*asked).tolist() == one_after_the_other(parts, slots, arrivals, size)


@given(lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=20), budget=st.integers(1, 12))
def test_micro_batches_know_what_their_growths_sum_to(lengths: list[tuple[int, int]], budget: int) -> None:
    growths = Growths.of([Growth(i, 0, new, rows) for i, (new, rows) in enumerate(lengths)])
    batches = packed(growths, np.arange(len(growths)), [], budget)
    new, rows = sums(batches)
    assert new.tolist() == [sum(g.new for g in batch) for batch in batches]
    assert rows.tolist() == [sum(g.rows for g in batch) for batch in batches]
    assert sorted(g for batch in batches for g in batch) == sorted(growths)
    assert joined(batches) == tuple(growth for batch in batches for growth in batch)


def sized(rng: random.Random) -> tuple[Round, Site, dict[str, list[KVBudget]]]:
    site = rng.choice([make_site((1, 1, 2), {"reward": (0, 1, 1, 2)}), make_site((1, 2, 1), {"reward": (2, 1, 1, 1)})])
    steps = rng.randint(1, 4)

    def prefill(first: int) -> tuple[tuple[Growth, ...], ...]:
        lengths, batches = [rng.randint(0, 3) for _ in range(3)], []
        for _ in range(rng.randint(1, 2)):  # `build` has decoding wait for as many as it has micro-batches
            news = [rng.randint(1, 3) for _ in lengths]
            slip = int(rng.random() < 0.1)
            batches.append(tuple(Growth(first + i, lengths[i] + slip, new) for i, new in enumerate(news)))
            lengths = [g.past + g.new for g in batches[-1]]
        return tuple(batches)

    dp = site.placements["actor"].dp
    stale = [prefill(10) for _ in range(dp)]
    decode = []
    for own in stale:
        cached = {g.seq_id: g.past + g.new for batch in own for g in batch}
        decode.append((tuple(Growth(i, past, rng.randint(1, 5)) for i, past in cached.items()), (Growth(20, 4, 2),)))
    round_ = Round(2, steps, tuple(decode), {"actor": tuple(stale), "reward": tuple(prefill(0) for _ in range(dp))})

    ranges = (4, 6), (9, 20), (0, 2)
    return round_, site, {role: [KVBudget(*(rng.randint(*r) for r in ranges)) for _ in range(dp)] for role in site.placements}


def overrun(round_: Round, role: str, replica: int, budget: KVBudget) -> bool:
    held: dict[int, int] = {}
    for batch in (*round_.prefill[role][replica], *(round_.decode[replica] if role == "actor" else ())):
        for growth in batch:
            if held.setdefault(growth.seq_id, growth.past) != growth.past:
                return True
            held[growth.seq_id] += min(growth.new, round_.steps) if batch in round_.decode[replica] else growth.new
    return budget.others + len(held) > budget.slots or max(held.values()) > budget.max_length


def test_rounds_are_refused_exactly_if_a_replay_overruns_a_cache() -> None:
    refused = 0
    for seed in range(300):
        round_, site, budgets = sized(random.Random(seed))
        each = [(role, d, budget) for role, own in budgets.items() for d, budget in enumerate(own)]
        bad = {f"the cache of {role} replica {d} " for role, d, budget in each if overrun(round_, role, d, budget)}
        faults = check(build(round_, site), round_, site, budgets)
        assert {fault.kind for fault in faults} <= {FaultKind.KV} and len(faults) == len(bad)
        assert all(any(fault.message.startswith(cache) for fault in faults) for cache in bad)
        refused += bool(bad)
        with pytest.raises(ScheduleError, match="cannot take round 2") if bad else nullcontext() as error:
            require_room(round_, {role: dict(enumerate(own)) for role, own in budgets.items()})
        assert all(cache in str(error.value) for cache in bad)
    assert 50 < refused < 250
    # The first sequence that is not continued is named.
    batches = (Growth(2, 0, 4), Growth(9, 0, 4), Growth(5, 0, 4)), (Growth(5, 4, 1), Growth(9, 3, 1), Growth(2, 3, 1))
    with pytest.raises(ScheduleError, match="reward replica 0 holds 4 tokens of sequence 9, which is to be continued at 3"):
        require_room(Round(1, 0, (), {"reward": (batches,)}), {"reward": {0: KVBudget(9, 9)}})


def test_every_round_is_checked_and_not_only_the_first_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs alike.  Caches of the second are as long as all rounds need but one, whose shape has been checked before."""
    made, generate = [], GENERATORS["intra"]
    monkeypatch.setattr(generators, "GENERATORS", {"intra": lambda *args: made.append(args) or generate(*args)})
    seen: list[PlannedRound] = []
    Run([new_planner(SITES["PP2 | 1"], "intra")], random.Random(2)).steps(6, lambda plans: seen.extend(plans))
    works = [[work for own in plan.works.values() for work in own] for plan in seen]
    lengths = [max(g.past + g.new for work in own for batch in (*work.prefill, *work.decode) for g in batch) for own in works]
    shapes = [shape(plan.round) for plan in seen]
    at = next(i for i in range(1, len(seen)) if lengths[i] > max(lengths[:i]) and shapes[i] in shapes[:i])

    made.clear()
    planner = new_planner(SITES["PP2 | 1"], "intra")
    planner.max_length = max(lengths[:at])
    with pytest.raises(ScheduleError, match=f"cannot take round {at + 1}:\n.* one grows to {lengths[at]}"):
        Run([planner], random.Random(2)).steps(6, lambda _: None)
    assert len(made) == len(set(shapes[:at])), "no schedule was made for that round, nor checked"


def test_sequences_that_keep_their_slots_are_counted() -> None:
    """A cache has to hold all other open sequences, too; these are too small for all at once."""
    changed = set()

    def visit(plans: list[PlannedRound]) -> None:
        for role, works in plans[0].works.items():
            for work in works:
                growing = {growth.seq_id for batch in (*work.prefill, *work.decode) for growth in batch}
                assert work.num_staying == len(growing - set(work.done))
                changed.update((role, name) for name in ("evict", "open", "prefill", "done") if getattr(work, name))

    Run([new_planner(SITES["DP2 | PP2xDP2"], "intra", 2)], random.Random(4)).steps(6, visit)
    assert {("actor", "prefill"), ("reference", "evict"), ("reward", "done"), ("critic", "done")} <= changed


def test_no_garbage_is_collected_while_a_round_is_planned() -> None:
    seen = []

    def order(seq_ids: Sequence[int]) -> list[int]:
        seen.append(gc.isenabled())
        return list(seq_ids)

    planner, buffer = new_planner(SITES["colocated PP2"], "woven"), filled(4, 3)
    planner.plan(1, buffer.active, [], 2, order)
    assert seen == [False] and gc.isenabled()
    planner.max_length = 1
    with pytest.raises(ScheduleError):
        planner.plan(2, buffer.active, [], 2, order)
    assert seen == [False, False] and gc.isenabled()


VERSION, INDEX = 3, 5


@dataclass
class Case:
    """A round: how many more tokens each sequence has in it, what the batch waits for, and who decodes what."""

    lengths: Mapping[int, int]
    offsets: Mapping[int, int]
    needed: int
    forced: frozenset[int]
    chunk: int
    start: int
    lanes: Sequence[Sequence[int]] = field(default_factory=list)
    overrun: Sequence[int] = field(default_factory=list)

    def signal(self) -> Readiness:
        return Readiness(self.needed, 0, self.lengths.keys(), [(self.forced, len(self.forced))] if self.forced else [])


def row_of(case: Case, seq_id: int, num_tokens: int) -> ChunkRow:
    """The first `num_tokens` tokens of a sequence in this round; each is unlike every other."""
    tokens = [1000 * seq_id + case.offsets[seq_id] + k for k in range(num_tokens)]
    row = ChunkRow(seq_id, case.offsets[seq_id], tokens, [-t / 7 for t in tokens], [-t / 9 for t in tokens], VERSION)
    if num_tokens == case.lengths[seq_id]:
        row.finish_clock, row.finish_reason = case.start + num_tokens, "eos" if seq_id % 2 else "length"
    return row


def lockstep(case: Case) -> tuple[Chunk, int]:
    """One process: a token for each running sequence a step, until the batch is complete or the chunk ends."""
    stop, running, counts = case.signal(), set(case.lengths), dict.fromkeys(case.lengths, 0)
    steps = 0
    while steps < case.chunk and running and not stop.ready:
        steps += 1
        for seq_id in sorted(running):
            counts[seq_id] += 1
            if counts[seq_id] == case.lengths[seq_id]:
                running.remove(seq_id)
                stop.finish(seq_id)
    rows = [row_of(case, seq_id, count) for seq_id, count in sorted(counts.items()) if count]
    return Chunk(INDEX, case.start + steps, rows), steps


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ids = draw(st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True))
    lengths, offsets = ({i: draw(st.integers(least, most)) for i in ids} for least, most in ((1, 12), (0, 30)))
    forced = frozenset(draw(st.sets(st.sampled_from(ids), max_size=2)))
    needed, chunk, start = (draw(st.integers(least, most)) for least, most in ((0, len(ids) + 1), (1, 10), (0, 50)))
    case = Case(lengths, offsets, needed, forced, chunk, start)
    assume(not case.signal().ready)
    homes = {i: draw(st.integers(0, 4)) for i in ids}  # five decode micro-batches, over replicas or not
    case.lanes = [[i for i in ids if homes[i] == lane] for lane in range(5)]
    case.overrun = [draw(st.integers(0, 10)) for _ in range(5)]
    return case


@settings(max_examples=400)
@given(cases())
def test_the_merged_chunk_is_that_of_one_process(case: Case) -> None:
    expected, steps = lockstep(case)
    rows = []
    for lane, overrun in zip(case.lanes, case.overrun, strict=True):
        reached = min(case.chunk, steps + overrun)  # a lane may not have heard yet that the batch is complete
        rows += [row_of(case, seq_id, min(reached, case.lengths[seq_id])) for seq_id in lane]
    assert merge_rows(INDEX, case.start, rows, case.signal()) == expected


def test_a_sequence_that_waited_for_a_slot_has_no_row() -> None:
    case = Case({1: 9, 2: 9}, {1: 0, 2: 0}, needed=2, forced=frozenset(), chunk=4, start=0)
    merged = merge_rows(INDEX, 0, [row_of(case, 1, 4), row_of(case, 2, 0)], case.signal())
    assert [row.seq_id for row in merged.rows] == [1] and merged.clock == 4
