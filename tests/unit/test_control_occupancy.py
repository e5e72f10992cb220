"""What is measured of a step's rollouts, on hand-made chunks and responses."""

from __future__ import annotations

import pytest

from oppo_megatron.chunks import Chunk, ChunkRow
from oppo_megatron.columns import columns_of
from oppo_megatron.control.occupancy import Occupancy, group_length_gap, length_gap
from oppo_megatron.records import Prompt, Rollout


def row(seq_id: int, num_tokens: int, finish_clock: int | None = None, offset: int = 0) -> ChunkRow:
    zeros = [0.0] * num_tokens
    return ChunkRow(seq_id, offset, [0] * num_tokens, zeros, zeros, version=0, finish_clock=finish_clock)


def rollout(num_tokens: int) -> Rollout:
    return Rollout(Prompt(0, 0, "", (1,)), 0, tokens=[0] * num_tokens)


def test_the_tail_is_what_the_longest_response_leaves_empty() -> None:
    occupancy = Occupancy(10)
    occupancy.record(Chunk(1, 14, [row(0, 1, 11), row(1, 2, 12), row(2, 4)]))
    assert occupancy.tail_waste == 1 - 7 / (4 * 3)
    occupancy.record(Chunk(2, 20, [row(2, 6, 20, offset=4)]))
    assert occupancy.tail_waste == 1 - 13 / (10 * 3)


def test_a_sequence_that_enters_within_a_chunk_takes_an_empty_place() -> None:
    """Row 2 runs from clock 2 to 4, after row 0 has ended: two places, never empty."""
    occupancy = Occupancy(0)
    occupancy.record(Chunk(1, 4, [row(0, 2, 2), row(1, 4), row(2, 2, 4)]))
    assert occupancy.tail_waste == 0


def test_a_clock_that_passes_by_is_no_waste() -> None:
    occupancy = Occupancy(0)
    occupancy.record(Chunk(1, 3, [row(0, 3, 3)]), 0)
    occupancy.record(Chunk(2, 12, [row(1, 4, 12)]), 8)
    assert (occupancy.num_steps, occupancy.tail_waste) == (7, 0)


def test_nothing_decoded_is_no_waste() -> None:
    occupancy = Occupancy(7)
    assert occupancy.tail_waste == 0
    occupancy.record(Chunk(1, 7, []))
    assert occupancy.tail_waste == 0


def test_length_gap_is_a_share_of_the_submitted_length() -> None:
    short, long = [rollout(10), rollout(20)], [rollout(60)]
    assert length_gap(short, []) == 0
    assert length_gap(short, long) == pytest.approx(1 - 15 / 30)
    assert length_gap(long, short) == pytest.approx(1 - 60 / 30)
    assert length_gap(long, [rollout(0)]) == -1.0


def test_the_gap_within_groups_is_to_the_longest_of_each() -> None:
    """Of two groups: (10 + 30) / 2 of 30, and all as long as the longest; without groups there is nothing to wait for."""
    batch = [rollout(10), rollout(30), rollout(8), rollout(8)]
    lengths = columns_of(batch).response_tokens
    assert [group_length_gap(lengths, size) for size in (2, 4)] == pytest.approx([(1 / 3 + 0) / 2, 1 - 14 / 30])
    assert group_length_gap(lengths, 1) is None
