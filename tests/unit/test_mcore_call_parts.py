"""The parts in which a GPU attends to the new tokens of a call: none is lost, none wastes or holds much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.mcore.kv import call_parts
from oppo_megatron.mcore.kv.call_parts import Part, parts_of

SEQUENCES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=12)


@given(SEQUENCES, st.sampled_from([1, 4]), st.sampled_from([None, 7]), st.integers(1, 3000), st.integers(16, 4000))
def test_every_new_token_is_in_one_part_that_sees_what_it_attends_to(
    sequences: list[tuple[int, int]], repeat: int, window: int | None, call: int, most: int
) -> None:
    past, lens = [p for p, _ in sequences], [n for _, n in sequences]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(call_parts, "MASK_NUMBERS", most)
        parts = parts_of(past, lens, repeat, window, call)
    seen: list[tuple[int, int]] = []
    for part in parts:
        assert part.mask_numbers(repeat) <= most or (part.alone and part.queries.stop - part.queries.start == 1)
        for row in range(part.rows.start, part.rows.stop):
            for column in range(part.queries.start, min(part.queries.stop, lens[row])):
                seen.append((row, column))
                position = past[row] + column
                first = 0 if window is None else max(0, position + 1 - window)
                assert part.keys.start <= first and position < part.keys.stop
                assert not part.causal or past[row] == part.keys.start == 0
    assert seen == [(row, column) for row, new in enumerate(lens) for column in range(new)]


def test_a_long_sequence_among_short_ones_attends_alone_and_new_ones_need_no_mask() -> None:
    short = [130] * 4
    parts = parts_of([0] * 9, [*short, 4000, *short], 8, None)
    assert parts == [
        Part(slice(0, 4), slice(0, 130), slice(0, 130), None, True),
        Part(slice(4, 5), slice(0, 4000), slice(0, 4000), None, True),
        Part(slice(5, 9), slice(0, 130), slice(0, 130), None, True),
    ]
    going_on = parts_of([4000, 100], [4000, 100], 8, None)
    assert len(going_on) > 2 and sum(part.mask_numbers(8) for part in going_on) > call_parts.MASK_NUMBERS
    assert [part.rows for part in going_on[-2:]] == [slice(0, 1), slice(1, 2)]
