"""Sequences that finish must not make the others gather their caches: calls follow the slots."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from oppo_megatron.cluster.world import open_world
from oppo_megatron.config.model import ModelConfig, RuntimeConfig
from oppo_megatron.engine.executor import Executor, build_links
from oppo_megatron.engine.generation import DecodeWorker
from oppo_megatron.engine.round_runner import Decoding, RoundRunner
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.scoring import ScoringWorker
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.mcore.kv.cached_plan import CallPlan
from oppo_megatron.mcore.kv.dense import DensePlaces, KVCache
from oppo_megatron.mcore.model import RoleModel
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Prompt
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.planning.scoring_book import ScoringBook
from oppo_megatron.schedule.rounds import Site
from tests.support.ppo import SHAPE

LENGTHS = [9, 3, 12, 5, 3, 10]


class ByLength(Stopping):
    """Sequences end at different steps, in no order of their slots."""

    def limit(self, seq_id: int) -> int:
        return LENGTHS[seq_id]


def new_rounds(model: RoleModel, device: torch.device, micro_batches: int) -> RoundRunner:
    placement = RolePlacement((0,))
    site = Site({"actor": placement, "reference": placement})
    stopping = ByLength(eos_ids=(), max_response_tokens=16)
    decode = DecodeWorker(model, model.new_cache(6), sampling=Sampling(), stopping=stopping)
    score = ScoringWorker("reference", model, model.new_cache(6), temperature=1.0)
    books = ActorBook(1, 6, stopping.limit), {"reference": ScoringBook("reference", 1, 6)}
    planner = RoundPlanner(site, "woven", (micro_batches, "auto"), 200, 32, *books)
    workers = {"actor": decode, "reference": score}
    executor = Executor(0, workers, build_links(site), 60.0, device, lambda *_: None)
    return RoundRunner(planner, executor, {"actor": 0, "reference": 0}, decode, None, {"reference": score})


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_calls_stay_dense_as_sequences_finish(monkeypatch: pytest.MonkeyPatch, micro_batches: int) -> None:
    spans: list[slice | torch.Tensor] = []
    begin = KVCache.begin

    def watched(cache: KVCache, seq_ids: Sequence[int], lens: Sequence[int]) -> CallPlan:
        plan = begin(cache, seq_ids, lens)
        assert isinstance(plan.places, DensePlaces)
        spans.append(plan.places.span)
        return plan

    monkeypatch.setattr(KVCache, "begin", watched)
    with open_world(RuntimeConfig(device="cpu").with_threads(1), {}) as world:
        groups = build_groups([0], 1, 1, "actor")
        assert groups is not None
        model = load_role(ModelConfig(init=SHAPE), groups, head="lm", max_length=32, device=world.device)
        rounds = new_rounds(model, world.device, micro_batches)
        buffer = RolloutBuffer(len(LENGTHS), delta=0, max_staleness=1)
        rounds.admit(buffer.admit(Prompt(i, i, "", (5, 6 + i)) for i in range(len(LENGTHS))))
        while not buffer.readiness().ready:
            active = buffer.active
            chunk = rounds.run(active, buffer.rollouts, 2, Decoding(buffer.clock, 0, buffer.readiness))
            assert chunk is not None
            buffer.record(chunk)
            rounds.recorded(active)
        assert [len(r.tokens) for r in buffer.rollouts] == LENGTHS
    assert len(spans) >= max(LENGTHS) and all(isinstance(span, slice) for span in spans)
