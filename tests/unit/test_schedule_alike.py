"""What is kept and reused in planning is what would have been made anew."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.columns import Table
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.readiness import Readiness, settled
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.planning import planner as planner_module
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.book import packed
from oppo_megatron.schedule.planning.ledger import KEPT, Memo
from oppo_megatron.schedule.planning.planner import NEARLY, RoundPlanner, median
from oppo_megatron.schedule.planning.replicas import BLOCK, dealt
from oppo_megatron.schedule.planning.scoring_book import ScoringBook
from oppo_megatron.schedule.rounds import Batches, Growth, Growths, Site
from oppo_megatron.schedule.weaving.costs import Costs, Linear, nearly
from oppo_megatron.schedule.weaving.cut import Cut, Work, choose_cut

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


@settings(deadline=None, max_examples=150)
@given(
    replicas=st.integers(1, 9),
    size=st.integers(1, 4),
    scarce=st.floats(0.3, 1.5),
    many=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_dealing_in_blocks_is_dealing_one_after_the_other(replicas: int, size: int, scarce: float, many: bool, seed: int) -> None:
    """With slots for all, for some, and for none; within one block and over several."""
    rng = random.Random(seed)
    counts = [rng.randint(0, 6) for _ in range(replicas)]
    parts = [(sum(rng.randint(1, 40) for _ in range(n)), n, rng.randint(0, n)) for n in counts]
    number = rng.randint(BLOCK - 5, 2 * BLOCK + 5) if many else rng.randint(0, 40)
    sizes = [rng.randint(1, size) for _ in range(number)]
    arrivals = [(rng.choice((7, 7, rng.randint(1, 300))), n, rng.randint(0, n)) for n in sizes]
    slots = max(1, int(scarce * (sum(counts) + sum(sizes)) / replicas))
    asked = np.array(parts, dtype=np.int64).T, slots, np.array(arrivals, dtype=np.int64).reshape(-1, 3).T, size
    assert dealt(*asked).tolist() == one_after_the_other(parts, slots, arrivals, size)


def test_what_is_alike_is_made_once() -> None:
    made: list[int] = []

    def total(numbers: np.ndarray, more: int) -> int:
        made.append(more)
        return int(numbers.sum()) + more

    memo, ones = Memo(), np.ones(6, dtype=np.int64)
    assert [memo.once(total, ones, 1), memo.once(total, ones.copy(), 1)] == [7, 7] and made == [1]
    assert memo.once(total, ones.reshape(2, 3), 1) == 7 and made == [1, 1], "of another shape"
    assert memo.once(total, 2 * ones, 1) == 13 and memo.once(total, ones, 2) == 8 and made == [1, 1, 1, 2]
    for more in range(3, 3 + KEPT):
        memo.once(total, ones, more)
    made.clear()
    assert memo.once(total, ones, 1) == 7 and made == [1], "the oldest is forgotten"


LINES = st.builds(Linear, st.floats(1e-4, 5e-3), st.floats(1e-6, 1e-4))


@given(data=st.data(), share=st.floats(0.01, 0.2))
def test_costs_are_near_where_no_action_takes_another_time(data: st.DataObject, share: float) -> None:
    """Between the numbers asked at, too."""

    def off(line: Linear) -> Linear:
        by = st.floats(1 - 1.5 * share, 1 + 1.5 * share)
        return Linear(line.fixed_s * data.draw(by), line.per_token_s * data.draw(by))

    lines = {role: (data.draw(LINES), data.draw(LINES)) for role in ("actor", "reward")}
    before = Costs(data.draw(LINES), prefill=lines)
    decode = tuple(off(before.decode_at(stage)) for stage in range(2))
    now = replace(before, decode=decode, prefill={role: tuple(map(off, own)) for role, own in lines.items()})
    near = nearly(now, before, share, (2, 40), (16, 900))
    seconds = [(now.decode_at(p)(n), before.decode_at(p)(n)) for p, n in product(range(2), range(2, 41))]
    for role, p, n in product(lines, range(2), range(16, 901, 4)):
        seconds.append((now.prefill_at(role, p)(n), before.prefill_at(role, p)(n)))
    apart = max(abs(a - b) / b for a, b in seconds)
    assert apart <= share * (1 + 1e-9) if near else apart >= share * (1 - 1e-9)
    assert not nearly(replace(now, prefill={}), before, 9.0, (2, 40), (16, 900)), "a role has gone"


@pytest.mark.parametrize("name", ["decode", "sample", "default_prefill", "score"])
def test_cuts_are_kept_until_an_action_takes_another_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a share of NEARLY, told from the costs by which they were sought: many small changes are a large one."""
    made: list[Cut] = []

    def cut(work: Work, costs: Costs, budget: int, **rest: Any) -> Cut:
        made.append(choose_cut(work, costs, budget, **rest))
        return made[-1]

    monkeypatch.setattr(planner_module, "choose_cut", cut)
    placement, ids = RolePlacement((0, 1), 1, 2), itertools.count()
    books = ActorBook(1, 400, lambda _: 50), {"reward": ScoringBook("reward", 1, 400)}
    planner = RoundPlanner(Site({"actor": placement, "reward": placement}), "woven", ("auto", "auto"), 64, 99, *books)

    def again(by: float) -> bool:
        """Whether a cut of the same round is sought anew where an action takes `by` as long."""
        line = getattr(Costs(), name)
        planner.learn(replace(Costs(), **{name: Linear(by * line.fixed_s, by * line.per_token_s)}))
        made.clear()
        buffer = RolloutBuffer(4, 0, 1)
        buffer.admit(Prompt(next(ids), 0, "", (1,) * 6) for _ in range(4))
        planner.plan(1, buffer.active, buffer.rollouts, 8, list)
        return bool(made)

    assert again(1.0) and not again(1.0)
    assert not again(1 + 0.9 * NEARLY) and not again(1 - 0.9 * NEARLY) and again(1 + 1.1 * NEARLY)
    assert not again(1 + 1.9 * NEARLY) and again(1.0)
    monkeypatch.setattr(planner_module, "NEARLY", 0.0)
    assert not again(1.0) and again(1.0001)


@given(data=st.data(), groups=st.integers(0, 12), batch=st.integers(1, 4), most=st.integers(1, 3))
def test_who_comes_first_is_found_without_sorting_all(data: st.DataObject, groups: int, batch: int, most: int) -> None:
    """As a plain loop finds it, which sorts all finishers; whether or not they fit."""
    ages = [data.draw(st.integers(0, most)) for _ in range(groups)]
    finished = [data.draw(st.booleans()) for _ in range(groups)]
    clocks, target = [data.draw(st.integers(0, 5)) for _ in range(groups)], data.draw(st.integers(0, batch))
    line = sorted((g for g in range(groups) if finished[g]), key=lambda g: (clocks[g], g))
    chosen, reserved = [g for g in range(groups) if ages[g] >= most], 0
    if len(chosen) <= target:
        for k in range(min(most, groups // batch) + 1):
            members = [g for g in range(groups) if ages[g] >= most - k]
            if len(members) > k * batch:
                missing = len(members) - k * batch - len(set(members) & set(chosen)) - reserved
                room = max(0, min(missing, target - len(chosen) - reserved))
                first = [g for g in line if g in members and g not in chosen][:room]
                chosen, reserved = chosen + first, reserved + max(0, missing - len(first))
        chosen += [g for g in line if g not in chosen][: max(0, target - len(chosen) - reserved)]
    found = settled(np.array(finished, dtype=np.bool_), np.array(clocks), np.array(ages), batch, most, target)
    assert found.tolist() == sorted(chosen)[:target]


@given(data=st.data(), size=st.integers(1, 3), groups=st.integers(1, 5))
def test_a_batch_is_not_ready_before_the_least_that_it_takes(data: st.DataObject, size: int, groups: int) -> None:
    order = data.draw(st.permutations(range(size * groups)))
    forced = data.draw(st.sets(st.integers(0, groups - 1)))
    waits = [([g * size + i for g in forced for i in range(size)], len(forced))] if forced else []
    signal = Readiness(data.draw(st.integers(0, groups)), 0, set(order), waits, size)
    least, ended = signal.least, 0
    while not signal.ready:
        signal.finish(order[ended])
        ended += 1
    assert least <= ended and signal.least == 0


@given(numbers=st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_a_median_that_is_counted_is_that_of_the_sorted(numbers: list[int]) -> None:
    assert median(np.array(numbers)) == int(np.median(numbers))


@given(lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=20), budget=st.integers(1, 12))
def test_micro_batches_know_what_their_growths_sum_to(lengths: list[tuple[int, int]], budget: int) -> None:
    growths = Growths.of([Growth(i, 0, new, rows) for i, (new, rows) in enumerate(lengths)])
    batches = packed(growths, np.arange(len(growths)), [], budget, Memo())
    new, rows = batches.sums
    assert new.tolist() == [sum(g.new for g in batch) for batch in batches]
    assert rows.tolist() == [sum(g.rows for g in batch) for batch in batches]
    assert sorted(g for batch in batches for g in batch) == sorted(growths)
    assert [list(each) for each in Batches.of([tuple(batch) for batch in batches]).sums] == [new.tolist(), rows.tolist()]


@given(sizes=st.lists(st.integers(0, 3), max_size=6), place=st.integers(-8, 8))
def test_micro_batches_in_one_table_are_those_in_a_list(sizes: list[int], place: int) -> None:
    ids = iter(range(100))
    plain = [tuple(Growth(next(ids), 5, 2, 1) for _ in range(size)) for size in sizes]
    table = Batches.of(plain)
    assert table == plain and tuple(table) == tuple(plain) and table[1:-1] == plain[1:-1]
    assert len(table) == len(plain) and hash(table) == hash(tuple(plain)) and Batches.of(table) is table
    assert table != [*plain, ()]
    if -len(plain) <= place < len(plain):
        assert table[place] == plain[place]
    else:
        with pytest.raises(IndexError):
            table[place]


@given(held=st.lists(st.integers(5, 40), unique=True), asked=st.lists(st.integers(0, 50)), data=st.data())
def test_a_table_finds_sequences_by_number(held: list[int], asked: list[int], data: st.DataObject) -> None:
    table = Table()
    table.add([Rollout(Prompt(seq_id, seq_id, "", (1,)), 0) for seq_id in held])
    wanted = np.array(asked, dtype=np.int64)
    assert table.rows(wanted).tolist() == [held.index(i) if i in held else -1 for i in asked]
    kept = data.draw(st.lists(st.booleans(), min_size=len(held), max_size=len(held)))
    table.keep(np.array(kept, dtype=np.bool_))
    left = [seq_id for seq_id, stays in zip(held, kept, strict=True) if stays]
    assert table.rows(wanted).tolist() == [left.index(i) if i in left else -1 for i in asked]
