"""A micro-batch through a stage: what is planned must be what the cache continues."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oppo_megatron.engine.splits import prefill
from oppo_megatron.mcore.kv.dense import KVCache
from oppo_megatron.mcore.out_of_memory import MemoryLimits
from oppo_megatron.schedule.rounds import Batch, Growth

CPU = torch.device("cpu")


def test_a_prefill_that_failed_when_it_had_cached_its_tokens_is_not_gone_on_from() -> None:
    """The planner's books still say that nothing is cached: the tokens would be computed behind themselves."""
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "num_slots": 2, "max_length": 8}
    cache = KVCache(**sizes, rope=(torch.ones(8, 2), torch.zeros(8, 2)), dtype=torch.float32, device=CPU)
    cache.open(7)
    batch, failing = (Growth(7, 0, 3, 1),), [True, False, False]

    def advance(part: Batch, hidden_T: Tensor | None, whole: bool) -> Tensor:
        cache.commit(cache.begin([7], [3]))
        if failing.pop(0):
            raise ValueError("behind the last layer")
        return torch.ones(1)

    def attempt() -> float:
        return float(prefill(cache, batch, None, advance, MemoryLimits().score, None)[0][1])

    with pytest.raises(ValueError, match="behind the last layer"):
        attempt()
    with pytest.raises(AssertionError, match="sequence 7 has 3 tokens cached, but 0 are planned"):
        attempt()
    cache.truncate(7, 0)
    assert attempt() == 1.0
