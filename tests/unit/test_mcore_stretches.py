"""Cuts between sequences that attend together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.mcore.cpu import stretches

LENGTHS = st.lists(st.integers(0, 600), min_size=1, max_size=40)


def cost(parts: list[slice], lengths: list[int], call: float) -> float:
    return sum(len(lengths[part]) * max(lengths[part]) + call for part in parts)


@given(LENGTHS, st.floats(1, 5000))
def test_rows_keep_their_order_and_are_cut_where_it_pays(lengths: list[int], call: float) -> None:
    parts, whole = stretches(lengths, call), slice(0, len(lengths))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(len(lengths)))
    assert cost(parts, lengths, call) < cost([whole], lengths, call) or parts == [whole]
    for part in parts:
        for middle in range(part.start + 1, part.stop):
            halves = [slice(part.start, middle), slice(middle, part.stop)]
            assert cost(halves, lengths, call) >= cost([part], lengths, call) - 1e-6


def test_carried_sequences_are_cut_from_new_ones() -> None:
    assert stretches([360, 352, 340, 70, 70, 70, 64, 64], 100) == [slice(0, 3), slice(3, 8)]
    assert stretches([70] * 8, 1) == [slice(0, 8)]
    assert stretches([1, 600], float("inf")) == [slice(0, 2)]
    assert stretches([5], 1) == [slice(0, 1)]
