"""Packing by token budget."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.schedule.packing import pack_by_tokens


def test_first_fit_decreasing_by_hand() -> None:
    assert pack_by_tokens([3, 7, 2, 5, 5, 1], budget=8) == [[1, 5], [3, 0], [4, 2]]


def test_an_item_longer_than_the_budget_is_alone() -> None:
    assert pack_by_tokens([1, 20, 0, 9], budget=10) == [[1], [3, 0, 2]]


def test_nothing_to_pack() -> None:
    assert pack_by_tokens([], budget=4) == []


def test_a_budget_below_one_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="not 0"):
        pack_by_tokens([1], budget=0)


@given(lengths=st.lists(st.integers(0, 60), max_size=60), budget=st.integers(1, 50))
def test_properties(lengths: list[int], budget: int) -> None:
    bins = pack_by_tokens(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(bins)
    loads = [sum(lengths[i] for i in b) for b in bins]
    for members, load in zip(bins, loads, strict=True):
        assert load <= budget or len(members) == 1
    # First fit leaves no two bins that would go into one.
    assert all(a + b > budget for a, b in combinations(loads, 2))
    assert bins == pack_by_tokens(tuple(lengths), budget)
