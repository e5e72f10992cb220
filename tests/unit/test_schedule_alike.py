"""What is kept and reused in planning is what would have been made anew."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.columns import Table
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.readiness import settled
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.packing import dealt
from oppo_megatron.schedule.planning import planner as planner_module
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.book import packed
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.planning.scoring_book import ScoringBook
from oppo_megatron.schedule.rounds import Batches, Growth, Growths, Site
from oppo_megatron.schedule.weaving.costs import Costs, Linear
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
def test_dealing_is_dealing_one_after_the_other(replicas: int, size: int, scarce: float, many: bool, seed: int) -> None:
    """With slots for all, for some, and for none."""
    rng = random.Random(seed)
    counts = [rng.randint(0, 6) for _ in range(replicas)]
    parts = [(sum(rng.randint(1, 40) for _ in range(n)), n, rng.randint(0, n)) for n in counts]
    number = rng.randint(0, 300 if many else 40)
    sizes = [rng.randint(1, size) for _ in range(number)]
    arrivals = [(rng.choice((7, 7, rng.randint(1, 300))), n, rng.randint(0, n)) for n in sizes]
    slots = max(1, int(scarce * (sum(counts) + sum(sizes)) / replicas))
    asked = np.array(parts, dtype=np.int64).T, slots, np.array(arrivals, dtype=np.int64).reshape(-1, 3).T, size
    assert dealt(*asked).tolist() == one_after_the_other(parts, slots, arrivals, size)


def test_a_cut_is_chosen_once_for_rounds_of_a_size_until_costs_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Costs] = []

    def cut(work: Work, costs: Costs, budget: int, **rest: Any) -> Cut:
        made.append(costs)
        return choose_cut(work, costs, budget, **rest)

    monkeypatch.setattr(planner_module, "choose_cut", cut)
    placement, ids = RolePlacement((0, 1), 1, 2), itertools.count()
    books = ActorBook(1, 400, lambda _: 50), {"reward": ScoringBook("reward", 1, 400)}
    planner = RoundPlanner(Site({"actor": placement, "reward": placement}), "woven", ("auto", "auto"), 64, 99, *books)
    dearer = Costs(decode=Linear(1.0, 1.0))
    for costs in (Costs(), dearer):
        planner.learn(costs)
        for _ in range(2):
            buffer = RolloutBuffer(4, 0, 1)
            buffer.admit(Prompt(next(ids), 0, "", (1,) * 6) for _ in range(4))
            planner.plan(1, buffer.active, buffer.rollouts, 8, list)
    assert made == [Costs(), dearer]


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


@given(lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=20), budget=st.integers(1, 12))
def test_micro_batches_know_what_their_growths_sum_to(lengths: list[tuple[int, int]], budget: int) -> None:
    growths = Growths.of([Growth(i, 0, new, rows) for i, (new, rows) in enumerate(lengths)])
    batches = packed(growths, np.arange(len(growths)), [], budget)
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
