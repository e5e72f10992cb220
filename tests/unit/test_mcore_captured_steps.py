"""Captured decode steps, with recordings in the place of CUDA graphs, draw what computed steps draw; calls stay dense."""

import cProfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from oppo_megatron.bench.decode import decode_round
from oppo_megatron.cluster.world import open_world
from oppo_megatron.config.model import KVLayout, ModelConfig, RuntimeConfig
from oppo_megatron.engine.device_decode import DeviceLane, batch_bucket
from oppo_megatron.engine.executor import Executor, build_links
from oppo_megatron.engine.generation import DecodeWorker
from oppo_megatron.engine.round_runner import Decoding, RoundRunner, decoder
from oppo_megatron.engine.round_state import Growing
from oppo_megatron.engine.sampler import Sampling
from oppo_megatron.engine.scoring import ScoringWorker
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.mcore import fused
from oppo_megatron.mcore.device import WARM_UPS, CapturedSteps
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.mcore.kv.cached_plan import CallPlan
from oppo_megatron.mcore.kv.sequence_cache import DensePlaces, KVCache
from oppo_megatron.mcore.model import DecodePath, RoleModel
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.schedule.actions import Op
from oppo_megatron.schedule.planning.actor_book import ActorBook
from oppo_megatron.schedule.planning.planner import RoundPlanner
from oppo_megatron.schedule.planning.scoring_book import ScoringBook
from oppo_megatron.schedule.rounds import Site
from tests.support.ppo import SHAPE
from tests.support.recorded_steps import RecordedSteps

SAMPLINGS = [Sampling(seed=3), Sampling(0.8, top_k=7, top_p=0.9, seed=4), Sampling(0.0)]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Limits(Stopping):
    of: Callable[[int], int] = int

    def limit(self, seq_id: int) -> int:
        return self.of(seq_id)


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with open_world(RuntimeConfig(device="cpu").with_threads(1), {}):
        yield


def new_model(path: DecodePath, dtype: str, **changes: Any) -> RoleModel:
    groups = build_groups([0], 1, 1, "actor")
    config = ModelConfig(init=SHAPE | changes, dtype=dtype)
    return load_role(config, groups, head="lm", max_length=64, device=CPU, path=path).requires_grad_(False)


def new_rounds(model: RoleModel, sampling: Sampling, sync_steps: int, layout: KVLayout) -> RoundRunner:
    return decoder(
        model, model.new_cache(9, layout=layout), sampling=sampling, stopping=Limits((17, 41), 50, of=lambda i: 8 + 5 * i),
        micro_batch_tokens=200, timeout_s=60.0, sync_steps=sync_steps,
    )  # fmt: skip


def decode(model: RoleModel, rounds: RoundRunner) -> list[list[int]]:
    """All rollouts to their ends, in rounds of 12 steps; the weights change once on the way."""
    buffer = RolloutBuffer(9, delta=0, max_staleness=1)
    buffer.admit(Prompt(i, i, "", (5, 6 + i)) for i in range(9))
    weights = [p.clone() for p in model.parameters()]
    while active := buffer.active:
        chunk = rounds.run(active, [], 12, Decoding(buffer.clock, 0, buffer.readiness))
        buffer.record(chunk)
        rounds.recorded(active)
        if chunk.index == 2:
            for parameter in model.parameters():
                parameter.mul_(1.1)
            model.end_weight_update()
            rounds.actor_changed()
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.copy_(weight)
    model.end_weight_update()
    return [rollout.tokens for rollout in buffer.take_batch()]


@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize(("path", "changes"), [
    ("fused", {}), ("module", {}), ("fused", {"model_type": "mistral", "sliding_window": 9}),
], ids=["fused", "module", "sliding window"])  # fmt: skip
def test_replayed_steps_draw_what_computed_steps_draw(
    world: None, path: DecodePath, changes: dict[str, Any], layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 and torch's norm, as on a GPU: fused layers then hold no copies of weights that an update would leave behind."""
    monkeypatch.setattr(fused, "fixed_norm", lambda weight_H, eps: lambda x: F.rms_norm(x, weight_H.shape, weight_H, eps))
    model = new_model(path, "bfloat16", **changes)
    for sampling in SAMPLINGS:
        expected = decode(model, new_rounds(model, sampling, 4, layout))
        rounds = new_rounds(model, sampling, 4, layout)
        rounds.decode.captured = recorded = RecordedSteps(model)
        assert decode(model, rounds) == expected and len({len(tokens) for tokens in expected}) > 4
        assert 2 <= recorded.num_graphs == len(recorded.recordings)
        assert sum(recording.replays for recording in recorded.recordings) > 4 * recorded.num_graphs


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_every_shape_is_captured_before_the_first_step(world: None, layout: KVLayout) -> None:
    model = new_model("fused", "bfloat16")
    cache, recorded = model.new_cache(9, layout=layout), RecordedSteps(model)
    lane = DeviceLane(model, cache, recorded, sampling=SAMPLINGS[0], eos_ids=(), sync_steps=4, name=0)
    lane.prepare()
    assert recorded.num_graphs == len([9, 8, 4, 2, 1])
    rows = [Growing(Rollout(Prompt(i, i, "", (5,)), admission=0), 30, 0) for i in range(7)]
    for row in rows:
        cache.open(row.seq_id)
    lane.load(rows, 0, 12)
    for end, running in ((4, 7), (8, 4), (12, 1)):
        lane.start(rows[:running])
        assert lane.last_step == end - 1 and lane.read()[1].shape == (4, 4, running)
    assert recorded.num_graphs == 5


def test_the_host_makes_few_calls_per_token(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 16 steps of 64 rows, started, read and booked; the time depends on what else the machine does."""
    model, profile = new_model("fused", "bfloat16"), cProfile.Profile()
    rounds = decoder(
        model, model.new_cache(64, layout="paged"), sampling=SAMPLINGS[0], stopping=Limits((17,), 60, of=lambda _: 60),
        micro_batch_tokens=200, timeout_s=60.0, sync_steps=16,
    )  # fmt: skip
    assert rounds.decode is not None
    compute = rounds.decode.compute
    profiled = partial(profile.runcall, compute)
    monkeypatch.setattr(rounds.decode, "compute", lambda action: (compute if action.op is Op.PREFILL else profiled)(action))
    monkeypatch.setattr(CapturedSteps, "__call__", lambda captured, key, step: None)
    rounds.decode.captured = CapturedSteps(CPU, list)
    decode_round(rounds, [Rollout(Prompt(i, i, "", (5, 6)), i) for i in range(64)], 48)
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls < 2.1 * 64 * 48, calls / (64 * 48)


def test_a_step_that_asks_the_device_is_refused(world: None) -> None:
    model, numbers = new_model("fused", "bfloat16"), torch.arange(3)
    for step in (lambda: int(numbers[0]), lambda: numbers[numbers > 1], lambda: numbers + torch.tensor([1, 2, 3], device="cpu")):
        recorded = RecordedSteps(model)
        with pytest.raises(AssertionError, match="cannot be captured"):
            for _ in range(WARM_UPS + 1):
                recorded("key", step)
    recorded = RecordedSteps(model)
    with pytest.raises(RuntimeError, match="meta"):  # a tensor that names no device
        for _ in range(WARM_UPS + 1):
            recorded("key", lambda: numbers * torch.arange(3))


class Counted(CapturedSteps):
    captures = replays = 0

    def _capture(self, step: Any) -> Any:
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            step()

        return SimpleNamespace(replay=replay)


def test_a_key_is_captured_once_and_again_where_weights_have_moved() -> None:
    weights, done = [torch.ones(3)], []
    steps = Counted(CPU, lambda: weights)
    for expected_captures in (2, 2, 4):
        steps.renew()
        for _ in range(5):
            for key in ("one", "other"):
                steps(key, lambda key=key: done.append(key))
        weights[0].mul_(2)  # as an optimizer does
        assert steps.captures == expected_captures
        if len(done) == 20:
            weights[0] = torch.ones(3)
    assert done == ["one", "other"] * 15 and steps.replays == 2 * (15 - 2 * WARM_UPS)


class Refusing(Counted):
    """Raises as torch does: the operation at fault, and then the end of the capture."""

    def _capture(self, step: Any) -> Any:
        self.captures += 1
        try:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for ...")
        except RuntimeError:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from None


def test_where_a_capture_is_refused_steps_run_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    steps = Refusing(CPU, lambda: [])
    for _ in range(5):
        for key in ("one", "other"):
            steps(key, lambda key=key: done.append(key))
    assert done == ["one", "other"] * 5 and steps.captures == 1 and steps.num_graphs == 0
    said = capsys.readouterr().err
    assert said.count("without CUDA graphs") == 1 and "not permitted when stream is capturing\n" in said


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory in capture"), RuntimeError("shape")])
def test_other_errors_of_a_capture_are_not_taken_for_a_refusal(error: RuntimeError) -> None:
    class Failing(Counted):
        def _capture(self, step: Any) -> Any:
            raise error

    steps = Failing(CPU, lambda: [])
    with pytest.raises(type(error), match=str(error)):
        for _ in range(WARM_UPS + 1):
            steps("key", lambda: None)


def test_batches_come_in_few_sizes() -> None:
    sizes = [batch_bucket(rows) for rows in range(1, 130)]
    assert sizes == sorted(sizes) and all(size >= rows for rows, size in enumerate(sizes, start=1))
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32, 64, 128, 256]


ENDS = [9, 3, 12, 5, 3, 10]


def woven_rounds(model: RoleModel, micro_batches: int) -> RoundRunner:
    site, stopping = Site(dict.fromkeys(("actor", "reference"), RolePlacement((0,)))), Limits((), 16, of=ENDS.__getitem__)
    decode = DecodeWorker(model, model.new_cache(6), sampling=Sampling(), stopping=stopping)
    score = ScoringWorker("reference", model, model.new_cache(6), temperature=1.0)
    books = ActorBook(1, 6, stopping.limit), {"reference": ScoringBook("reference", 1, 6)}
    planner = RoundPlanner(site, "woven", (micro_batches, "auto"), 200, 32, *books)
    executor = Executor(0, {"actor": decode, "reference": score}, build_links(site), 60.0, CPU, lambda *_: None)
    return RoundRunner(planner, executor, {"actor": 0, "reference": 0}, decode, None, {"reference": score})


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_calls_stay_dense_as_sequences_finish(world: None, monkeypatch: pytest.MonkeyPatch, micro_batches: int) -> None:
    """Sequences that finish do not make the others gather their caches: calls follow the slots."""
    spans: list[slice | torch.Tensor] = []
    begin = KVCache.begin

    def watched(cache: KVCache, seq_ids: Sequence[int], lens: Sequence[int]) -> CallPlan:
        plan = begin(cache, seq_ids, lens)
        assert isinstance(plan.places, DensePlaces)
        spans.append(plan.places.span)
        return plan

    monkeypatch.setattr(KVCache, "begin", watched)
    rounds, buffer = woven_rounds(new_model("packed", "float32"), micro_batches), RolloutBuffer(6, delta=0, max_staleness=1)
    rounds.admit(buffer.admit(Prompt(i, i, "", (5, 6 + i)) for i in range(len(ENDS))))
    while not buffer.readiness().ready:
        active = buffer.active
        buffer.record(rounds.run(active, buffer.rollouts, 2, Decoding(buffer.clock, 0, buffer.readiness)))
        rounds.recorded(active)
    assert [len(r.tokens) for r in buffer.rollouts] == ENDS
    assert len(spans) >= max(ENDS) and all(isinstance(span, slice) for span in spans)
