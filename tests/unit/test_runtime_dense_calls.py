"""Sequences that finish must not make the others gather their caches: calls follow the slots."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oppo_megatron.config.model import ModelConfig, RuntimeConfig
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Prompt
from oppo_megatron.runtime.generation import Generator
from oppo_megatron.runtime.mcore.groups import build_groups
from oppo_megatron.runtime.mcore.kv_cache import CachedPlan, KVCache
from oppo_megatron.runtime.roles import load_role
from oppo_megatron.runtime.sampler import Sampling
from oppo_megatron.runtime.scoring import Scorer
from oppo_megatron.runtime.stopping import Stopping
from oppo_megatron.runtime.world import open_world
from tests.support.ppo import SHAPE

LENGTHS = [9, 3, 12, 5, 3, 10]


class ByLength(Stopping):
    """Sequences end at different steps, in no order of their slots."""

    def limit(self, seq_id: int) -> int:
        return LENGTHS[seq_id]


def test_calls_stay_dense_as_sequences_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[int, int] | None] = []
    begin = KVCache.begin

    def watched(cache: KVCache, seq_ids: Sequence[int], lens: Sequence[int]) -> CachedPlan:
        plan = begin(cache, seq_ids, lens)
        spans.append(plan.span)
        return plan

    monkeypatch.setattr(KVCache, "begin", watched)
    with open_world(RuntimeConfig(device="cpu", threads_per_rank=1), {}) as world:
        groups = build_groups([0], 1, 1, "actor")
        assert groups is not None
        model = load_role(ModelConfig(init=SHAPE), groups, head="lm", max_length=32, device=world.device)
        stopping = ByLength(eos_id=-1, max_response_tokens=16)
        generator = Generator(model, model.new_cache(6), sampling=Sampling(), stopping=stopping, prefill_tokens=200)
        scorer = Scorer("reference", model, model.new_cache(6), prefill_tokens=200, temperature=1.0)
        buffer = RolloutBuffer(len(LENGTHS), delta=0, max_deferrals=1)
        buffer.admit(Prompt(i, i, "", (5, 6 + i)) for i in range(len(LENGTHS)))
        while not (stop := buffer.readiness()).ready:
            buffer.record(
                generator.decode_round(buffer.active, stop, index=0, max_steps=2, clock=buffer.clock, version=0)
            )
            scorer.advance(buffer.rollouts)
        assert [len(r.tokens) for r in buffer.rollouts] == LENGTHS
    assert len(spans) >= max(LENGTHS) and None not in spans
