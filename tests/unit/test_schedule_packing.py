"""Packing by token budget, and dividing among replicas."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_megatron.schedule.packing import Packing, balance, dealt, pack_by_tokens, packed_in_order, packing_figures
from oppo_megatron.schedule.planning.book import packed
from oppo_megatron.schedule.rounds import Growth, Growths, joined, sums


def test_first_fit_decreasing_by_hand() -> None:
    assert pack_by_tokens([3, 7, 2, 5, 5, 1], budget=8) == [[1, 5], [3, 0], [4, 2]]


def test_an_item_longer_than_the_budget_is_alone() -> None:
    assert pack_by_tokens([1, 20, 0, 9], budget=10) == [[1], [3, 0, 2]]


def test_nothing_to_pack() -> None:
    assert pack_by_tokens([], budget=4) == []


def test_a_budget_below_one_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="not 0"):
        pack_by_tokens([1], budget=0)


def one_by_one(lengths: list[int], budget: int) -> list[list[int]]:
    """First-fit decreasing, item by item."""
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = (b for b in bins if sum(lengths[i] for i in b) + lengths[item] <= budget)
        found = next(fits, None)
        if found is None:
            bins.append([item])
        else:
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


def test_longest_processing_time_first_by_hand() -> None:
    assert balance([3, 7, 2, 5, 5, 1], 2) == [[0, 1, 2], [3, 4, 5]]
    assert balance([4, 4, 4], 3) == [[0], [1], [2]]
    assert balance([0, 0, 9], 2) == [[2], [0, 1]]
    assert balance([], 2) == [[], []]


def test_division_into_no_parts_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="not 0"):
        balance([1], 0)


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


@given(parts=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=12), min_size=1, max_size=4), budget=st.integers(1, 60))
def test_figures_are_shares(parts: list[list[int]], budget: int) -> None:
    figures = packing_figures([Packing.of(parts, budget)])
    assert 0 < figures["packing_efficiency"] <= 1
    assert 0 <= figures["padding_saved"] < 1
    assert (figures["padding_saved"] == 0) == (len({n for part in parts for n in part}) == 1)


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
    replicas=st.integers(1, 9), size=st.integers(1, 4), scarce=st.floats(0.3, 1.5), many=st.booleans(), seed=st.integers(0, 10**6)
)
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
