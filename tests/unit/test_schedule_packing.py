"""Packing by token budget."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.schedule.packing import Packing, balance, pack_by_tokens, packed_in_order, packing_figures


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
    members, ends = packed_in_order(np.array(lengths, dtype=np.int64), budget)
    assert [members[start:end].tolist() for start, end in pairwise(ends)] == [sorted(b) for b in bins]
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
    assert packing_figures([packing, whole]) == {
        "packing_efficiency": 31 / 40,
        "padding_saved": pytest.approx(1 - 31 / 50),
    }


@given(
    parts=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=12), min_size=1, max_size=4),
    budget=st.integers(1, 60),
)
def test_figures_are_shares(parts: list[list[int]], budget: int) -> None:
    figures = packing_figures([Packing.of(parts, budget)])
    assert 0 < figures["packing_efficiency"] <= 1
    assert 0 <= figures["padding_saved"] < 1
    assert (figures["padding_saved"] == 0) == (len({n for part in parts for n in part}) == 1)
