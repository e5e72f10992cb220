"""Which errors mean that memory ran out, and the limits that the error for them names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oppo_megatron.errors import CapacityError
from oppo_megatron.mcore.device import is_out_of_memory, memory_for, too_many_sequences, too_many_tokens
from tests.support.processes import room_for


def test_what_allocators_raise() -> None:
    with room_for(64), pytest.raises(RuntimeError) as by_torch:
        torch.empty(2**30)
    with room_for(64), pytest.raises(MemoryError) as by_numpy:
        np.zeros(2**30)
    assert is_out_of_memory(by_torch.value) and is_out_of_memory(by_numpy.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("could not create a primitive")), "oneDNN's kernel had no room for its code"
    assert not is_out_of_memory(RuntimeError("could not create a primitive descriptor for a matmul primitive"))
    assert not is_out_of_memory(CapacityError("a cache is full")), "ours say something else"
    assert not is_out_of_memory(RuntimeError("[/gloo/transport] connection closed"))


def test_the_error_has_work_cause_and_remedy() -> None:
    with pytest.raises(CapacityError) as raised, room_for(64), memory_for(lambda: ("a test", "use less")):
        torch.empty(2**40)
    assert str(raised.value).startswith("memory ran out in a test (DefaultCPUAllocator: can't allocate memory")
    assert str(raised.value).endswith("); use less")
    for error in ValueError("another"), RuntimeError("another"), CapacityError("another"):
        with pytest.raises(type(error), match="^another$"), memory_for(lambda: ("a test", "use less")):
            raise error


@pytest.mark.parametrize(
    ("lengths", "answers", "size", "remedy"),
    [
        ([30, 20, 50], 1, 100, "set runtime.micro_batch_tokens to 50 or less"),
        ([70, 20], 1, 90, "set runtime.micro_batch_tokens to 70 or less"),
        ([90], 1, 90, "lower the maximum lengths"),
        ([30, 40, 20, 20], 2, 110, "set runtime.micro_batch_tokens to 80 or less"),
        ([30, 40], 2, 70, "lower the maximum lengths"),
    ],
)
def test_a_micro_batch_keeps_whole_sequences_and_pairs(lengths: list[int], answers: int, size: int, remedy: str) -> None:
    work, named = too_many_tokens("a training micro-batch", lengths, answers)
    assert work == f"a training micro-batch of {size} tokens" and named.startswith(remedy)


def test_fewer_sequences_are_decoded_with_a_smaller_cache() -> None:
    work, remedy = too_many_sequences("a decode step", 32, 9 * 2**20)
    assert work == "a decode step of 32 sequences" and remedy.startswith("set runtime.kv_cache_mb to 4 or less")
