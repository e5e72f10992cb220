"""What counts as memory that ran out, what is free again then, and how work is divided."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.errors import CapacityError
from oppo_megatron.mcore.out_of_memory import (
    Begun,
    Done,
    Exhausted,
    MemoryLimit,
    MemoryLimits,
    attempt,
    halves,
    in_smaller_ones,
    is_out_of_memory,
)
from oppo_megatron.schedule.rounds import Growth
from tests.support.limits import room_for

growths = st.builds(
    lambda seq, past, new, rows: Growth(seq, past, new, min(rows, new)),
    st.integers(0, 9), st.integers(0, 9), st.integers(1, 9), st.integers(0, 9),
)  # fmt: skip


@given(st.lists(growths, min_size=1, max_size=6))
def test_halves_are_the_whole_one_after_the_other(batch: list[Growth]) -> None:
    tokens = sum(g.new for g in batch)
    if tokens < 2:
        return
    first, second = halves(tuple(batch))
    assert sum(g.new for g in first) == tokens // 2 and all(g.new for g in (*first, *second))

    def places(part: tuple[Growth, ...] | list[Growth]) -> list[tuple[int, int, bool]]:
        """(sequence, position, whether it gives an output) of every token in order"""
        return [(g.seq_id, g.past + k, k >= g.new - g.rows) for g in part for k in range(g.new)]

    assert places(first) + places(second) == places(batch)


def test_what_allocators_say() -> None:
    with room_for(64), pytest.raises(RuntimeError) as torch_told:
        torch.empty(2**30)
    with room_for(64), pytest.raises(MemoryError) as numpy_told:
        np.zeros(2**30)
    assert is_out_of_memory(torch_told.value) and is_out_of_memory(numpy_told.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("could not create a primitive")), "oneDNN's kernel had no room for its code"
    assert not is_out_of_memory(RuntimeError("could not create a primitive descriptor for a matmul primitive"))
    assert not is_out_of_memory(CapacityError("a cache is full")), "ours say something else"
    assert not is_out_of_memory(RuntimeError("[/gloo/transport] connection closed"))


def test_what_was_held_is_free_again() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        held = torch.ones(8)
        seen.append(weakref.ref(held))
        torch.empty(2**40)

    with room_for(64):
        outcome = attempt(work)
    assert isinstance(outcome, Exhausted) and "can't allocate memory" in outcome.told
    assert seen[0]() is None
    assert attempt(lambda: 3) == Done(3)
    with pytest.raises(ValueError, match="another"):
        attempt(lambda: (_ for _ in ()).throw(ValueError("another")))


def test_an_memory_limit_only_falls() -> None:
    told: list[str] = []
    memory_limit = MemoryLimit("decode", "a decode step", "sequences", tell=told.append)
    assert memory_limit.within(100) == 100
    memory_limit.lower(20, "no more", last=None)
    memory_limit.lower(40, "no more", last=None)
    assert (memory_limit.most, memory_limit.times, memory_limit.within(4)) == (10, 2, 4)
    assert told[0] == "rank 0 ran out of memory in a decode step of 20 sequences (no more): at most 10 from here on"
    memory_limits = MemoryLimits(decode=memory_limit)
    assert memory_limits.vector() == [0, 0, 10, 2]
    other = MemoryLimits()
    other.resume([7, 0, 3])
    assert (other.train.most, other.score.most, other.decode.most) == (7, None, 3)


@pytest.mark.parametrize(
    ("sequences", "sizes", "says"),
    [(1, 30, "one sequence, 30 tokens long, alone"), (2, 30, "alone"), (0, 30, "in the reduction of gradients")],
)
def test_what_does_not_become_smaller_ends(sequences: int, sizes: int, says: str) -> None:
    """A sequence, or a pair that is never divided; or where no micro-batch was under way."""
    begun, calls = Begun(), []

    def work(most: int) -> None:
        calls.append(most)
        begun.note(sequences, sizes)
        raise MemoryError("no more")

    memory_limit = MemoryLimit("train", "a training micro-batch", "tokens", tell=lambda _: None)
    with pytest.raises(CapacityError, match=says):
        in_smaller_ones(work, 64, memory_limit, begun, lambda: None)
    assert calls == ([64, 15] if sequences == 2 else [64])
