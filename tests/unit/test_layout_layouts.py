"""Which layouts fit, and the nearest of them, against a search over everything."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.config.model import format_ranks
from oppo_megatron.layout.layouts import Limits, Sizes, divisors, layouts_of, nearest_counts, nearest_layouts, suggestion
from oppo_megatron.layout.placements import parse_ranks

UPTO12 = st.integers(1, 12)
LIMITS = st.builds(Limits, UPTO12, UPTO12, st.none() | st.integers(1, 8), st.sampled_from([1, 2]))
SIZES = st.builds(Sizes, *[st.integers(1, 8)] * 4)


def every_layout(num_ranks: int, limits: Limits, most_vpp: int) -> set[Sizes]:
    up_to = range(1, num_ranks + 1)
    found = set()
    for tp, pp, dp, vpp in product(up_to, up_to, up_to, range(1, most_vpp + 1)):
        chunk = limits.layers / pp / vpp
        fits = tp * pp * dp == num_ranks and limits.width / tp == limits.width // tp and chunk == int(chunk)
        fits = fits and tp >= limits.min_tp and (pp > 1 or vpp == 1)
        if fits and (limits.sequences is None or limits.sequences >= dp):
            found.add(Sizes(tp, pp, dp, vpp))
    return found


@given(UPTO12, LIMITS, st.booleans())
def test_all_that_fit_are_found_and_nothing_else(num_ranks: int, limits: Limits, interleaved: bool) -> None:
    found = list(layouts_of(num_ranks, limits, interleaved=interleaved))
    assert len(found) == len(set(found))
    assert set(found) == every_layout(num_ranks, limits, limits.layers if interleaved else 1)
    assert all(limits.admits(sizes) for sizes in found)


@given(SIZES, st.integers(1, 24), LIMITS)
def test_nearest_first(asked: Sizes, num_ranks: int, limits: Limits) -> None:
    found = nearest_layouts(asked, num_ranks, limits, lambda sizes: True)

    def distance(sizes: Sizes) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(sizes, asked, strict=True))

    distances = [distance(sizes) for sizes in found]
    assert distances == pytest.approx(sorted(distances))
    if asked.num_ranks == num_ranks and limits.admits(asked):
        assert found[0] == asked


@given(st.integers(1, 30), LIMITS)
def test_nearest_numbers_of_ranks(num_ranks: int, limits: Limits) -> None:
    by_search = [count for count in range(1, 61) if any(layouts_of(count, limits))]
    expected = sorted(by_search, key=lambda count: (abs(count - num_ranks), count))[:3]
    if len(expected) == 3 and all(abs(count - num_ranks) < 30 for count in expected):
        assert nearest_counts(num_ranks, limits)[:3] == expected
    assert all(any(layouts_of(count, limits)) for count in nearest_counts(num_ranks, limits)[:3])


def test_what_a_message_says() -> None:
    limits = Limits(width=4, layers=6, sequences=2)
    assert suggestion(Sizes(8), 8, limits) == (
        "; nearest that fit 8 ranks: tp 4 x pp 1 x dp 2, tp 4 x pp 2 x dp 1, tp 2 x pp 2 x dp 2"
    )
    assert suggestion(Sizes(5), 5, limits) == "; no layout fits 5 ranks, the nearest numbers that one fits are 4, 6, 3"
    assert suggestion(Sizes(1, 4, 1, 2), 4, Limits(1, 8)).endswith(
        "tp 1 x pp 4 x dp 1 with vpp 2, tp 1 x pp 4 x dp 1, tp 1 x pp 2 x dp 2 with vpp 2"
    )
    assert suggestion(Sizes(), 1, None) == ""
    assert suggestion(Sizes(1, 1, 8), 8, limits, lambda sizes: False) == "; no layout over 8 ranks would do"
    assert suggestion(Sizes(), 1, limits, lambda sizes: sizes.tp == 4).endswith(
        "; no layout fits 1 rank, the nearest numbers that one fits are 4, 8, 12"
    )


@given(st.integers(1, 3000))
def test_divisors(number: int) -> None:
    assert divisors(number) == tuple(part for part in range(1, number + 1) if number % part == 0)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_written_as_they_are_read(ranks: set[int]) -> None:
    text = format_ranks(sorted(ranks))
    assert parse_ranks(text) == tuple(sorted(ranks))
    assert text.count(",") + 1 == sum(rank - 1 not in ranks for rank in ranks), "as few parts as there are runs"
