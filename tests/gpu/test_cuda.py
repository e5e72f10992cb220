"""The same code on a CUDA device: `make gpu-test`.  Each test takes the device, so that it can be tried on a CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from oppo_megatron.bench.gpu import GpuBench
from oppo_megatron.cluster.world import open_world
from oppo_megatron.config.model import ModelConfig, RuntimeConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.engine.device_decode import DeviceLane
from oppo_megatron.engine.round_runner import Decoding, RoundRunner, decoder
from oppo_megatron.engine.round_state import Growing
from oppo_megatron.engine.sampler import Sampling, draw
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.integrations.huggingface import write_random_checkpoint
from oppo_megatron.mcore import layers
from oppo_megatron.mcore.attention import PackedPlan, Reading
from oppo_megatron.mcore.device import WARM_UPS, CapturedSteps, run_eagerly
from oppo_megatron.mcore.groups import build_groups
from oppo_megatron.mcore.kv.paged import PagedKVCache, find_kernel
from oppo_megatron.mcore.model import RoleModel, step
from oppo_megatron.mcore.roles import load_role
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Prompt, Rollout
from oppo_megatron.train.entry import run_ppo
from oppo_megatron.train.inputs import read_inputs
from oppo_megatron.train.saving.preemption import Preemption
from tests.e2e.test_bench import TINY, WORK
from tests.support.ppo import SHAPE, Outcome, Workspace, read_outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run on a machine that has one"),
]


@pytest.fixture
def device() -> str:
    return "cuda"


def test_cached_steps_equal_the_full_forward(device: str) -> None:
    for changes in ({}, {"model_type": "mistral", "sliding_window": 9}):
        with open_world(RuntimeConfig(device=device)) as world:
            groups = build_groups([0], 1, 1, "actor")
            assert groups is not None
            model = load_role(ModelConfig(init=SHAPE | changes), groups, head="lm", max_length=64, device=world.device)
            tokens_T = torch.randint(0, 288, (50,), device=world.device)
            with torch.no_grad():
                full_TV = model.logits(model(tokens_T, PackedPlan([50], model.rope)))
            kv = model.new_cache(num_slots=2)
            kv.open(0)
            pieces = [step(model, kv, [0], [len(chunk)], chunk) for chunk in tokens_T.split([20, 1, 1, 7, 21])]
            assert float((model.logits(torch.cat(pieces)) - full_TV).abs().max()) < 1e-4 * float(full_TV.abs().max())


def test_draws_never_leave_the_support(device: str) -> None:
    """A cumulative sum in float32 may round: still no token of probability 0 is drawn, and the log-probs are the row's."""
    logits_RV = torch.randn(64, 5000, device=device).masked_fill_(torch.rand(64, 5000, device=device) < 0.5, -torch.inf)
    for position in range(50):
        drawn = draw(logits_RV, Sampling(seed=3), range(64), [position] * 64)
        assert bool(drawn.logprobs.isfinite().all())
        expected_R = logits_RV.log_softmax(-1).gather(-1, drawn.tokens[:, None])[:, 0]
        assert float((drawn.logprobs - expected_R).abs().max()) < 1e-4


def test_gated_activations_by_one_kernel_equal_torchs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if layers.gate_kernels(torch.device(device)) is None:
        pytest.skip("no kernel for gated activations: install triton with a C compiler")
    found, grad = [], torch.randn(70, 900, device=device, dtype=torch.bfloat16)
    values = torch.randn(70, 1800, device=device, dtype=torch.bfloat16)
    values[:, ::9], values[:, 1::9] = 0.75, -0.75
    for kernels in (layers.gate_kernels, lambda _: None):
        monkeypatch.setattr(layers, "gate_kernels", kernels)
        for activation, clamp in ("silu", None), ("silu", (0.75, 1.7)), ("gelu_pytorch_tanh", None):
            given = values.clone().requires_grad_()
            out = layers.gated(given, activation, clamp)
            found.append([out.detach(), *torch.autograd.grad(out, given, grad)])
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1.6e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ppo_in_one_process(tmp_path: Path, device: str, dtype: str) -> None:
    changes: dict[str, Any] = {f"{role}.dtype": dtype for role in ("actor", "critic", "reward")}
    if dtype == "float32":
        changes["guards.logprob_gap"] = 1e-3
    config = TrainConfig(
        **Workspace.create(tmp_path).config("cuda", **{"runtime.device": device, "overlap.intra": True}, **changes)
    )
    outcome = _run(config, device)
    assert len(outcome.rollouts) == 18
    assert max(line["logprob_gap"] for line in outcome.metrics) < (1e-3 if dtype == "float32" else 0.5)


def test_streams_side_by_side_change_nothing(tmp_path: Path, device: str) -> None:
    """Scoring on streams of its own, beside the decoding, against scoring after it: the same tokens and scores."""
    workspace, outcomes = Workspace.create(tmp_path), []
    for intra in (False, True):
        changes = {"runtime.device": device, "overlap.intra": intra, "steps": 1, "guards.logprob_gap": 1e-3}
        outcomes.append(_run(TrainConfig(**workspace.config(f"intra-{intra}", **changes)), device))
    after, beside = outcomes
    assert beside.tokens() == after.tokens()
    for name in ("reward_mean", "kl_mean", "value_mean"):
        assert beside.metrics[0][name] == pytest.approx(after.metrics[0][name], abs=1e-3)


class OwnLimits(Stopping):
    """Limits of its own make the batch shrink on the way."""

    def limit(self, seq_id: int) -> int:
        return 8 + 5 * seq_id


@contextmanager
def decoding(
    device: str, dtype: str, layout: str, sync_steps: int, config: ModelConfig | None = None
) -> Iterator[tuple[RoleModel, RoundRunner]]:
    with open_world(RuntimeConfig(device=device)) as world:
        groups = build_groups([0], 1, 1, "actor")
        assert groups is not None
        config = config or ModelConfig(init=SHAPE, dtype=dtype)
        model = load_role(config, groups, head="lm", max_length=128, device=world.device).requires_grad_(False)
        rounds = decoder(
            model, model.new_cache(9, layout=layout), sampling=Sampling(seed=3), stopping=OwnLimits((), 50),
            micro_batch_tokens=200, timeout_s=60.0, sync_steps=sync_steps,
        )  # fmt: skip
        yield model, rounds


def decode(rounds: RoundRunner, version: int, prompts: Sequence[tuple[int, ...]]) -> list[Rollout]:
    buffer = RolloutBuffer(9, delta=0, max_staleness=1)
    buffer.admit(Prompt(i, i, "", prompt) for i, prompt in enumerate(prompts))
    while active := buffer.active:
        chunk = rounds.run(active, [], 12, Decoding(buffer.clock, version, buffer.readiness))
        assert chunk is not None
        buffer.record(chunk)
        rounds.recorded(active)
    return buffer.take_batch()


def decode_twice(model: RoleModel, rounds: RoundRunner) -> list[list[int]]:
    """The same prompts under two policies, the second of which is written where the first was."""
    found = []
    for version in range(2):
        found += [rollout.tokens for rollout in decode(rounds, version, [(5, 6 + i) for i in range(9)])]
        for parameter in model.parameters():
            parameter.mul_(1.1)
        model.end_weight_update()
        rounds.actor_changed()
    return found


@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_draw_what_computed_steps_draw(device: str, dtype: str, layout: str) -> None:
    """Captured and computed steps call the same kernels: their tokens are the same, whatever the rounding."""
    with decoding(device, dtype, layout, 4) as (model, rounds):
        assert rounds.decode is not None
        rounds.decode.captured = None
        expected = decode_twice(model, rounds)
    with decoding(device, dtype, layout, 4) as (model, rounds):
        assert rounds.decode is not None
        found = decode_twice(model, rounds)
        captured = rounds.decode.captured
        assert found == expected
        if device == "cuda":
            assert captured is not None
            num_graphs = captured.num_graphs
            assert num_graphs > 1
            decode_twice(model, rounds)
            assert captured.num_graphs == num_graphs, "an update in place leaves every graph as good as it was"


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_captured_steps_give_the_log_probs_of_transformers_on_the_cpu(tmp_path: Path, device: str, layout: str) -> None:
    """Lengths that differ and a batch that shrinks: a replayed step that attended to stale lengths would show."""
    write_random_checkpoint(SHAPE, tmp_path / "model", torch.float32, torch.device("cpu"))
    with decoding(device, "float32", layout, 4, ModelConfig(checkpoint=tmp_path / "model")) as (_, rounds):
        rollouts = decode(rounds, 0, [tuple(range(5, 8 + 3 * i)) for i in range(9)])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert len({len(rollout.tokens) for rollout in rollouts}) == 9
    for rollout in rollouts:
        tokens_1T = torch.tensor([[*rollout.prompt.tokens, *rollout.tokens]])
        with torch.no_grad():
            logp_TV = model(tokens_1T).logits[0, len(rollout.prompt.tokens) - 1 : -1].log_softmax(-1)
        expected_T = logp_TV.gather(-1, tokens_1T[0, len(rollout.prompt.tokens) :, None])[:, 0]
        assert float((torch.tensor(rollout.logprobs) - expected_T).abs().max()) < 1e-3


def test_memory_that_ran_out_can_be_used_again(device: str) -> None:
    """Runs outside of a capture and in one, which must not leave the allocator in it."""
    place = torch.device(device)

    def too_much() -> None:
        torch.empty(1 << 50, dtype=torch.uint8, device=place)

    with pytest.raises(torch.OutOfMemoryError):
        too_much()
    numbers = torch.zeros(3, device=place)
    steps = CapturedSteps(place, lambda: [])
    with torch.cuda.stream(torch.cuda.Stream(place)):
        for _ in range(WARM_UPS + 2):
            steps("good", lambda: numbers.add_(1))
        for _ in range(WARM_UPS):
            steps("too much", lambda: None)
        with pytest.raises(torch.OutOfMemoryError):
            steps("too much", too_much)
        for _ in range(WARM_UPS + 2):
            steps("good", lambda: numbers.add_(1))
            steps("other", lambda: numbers.add_(numbers.new_ones(3)))
        found = numbers.tolist()
    assert found == [3.0 * (WARM_UPS + 2)] * 3 and steps.num_graphs == 2


def test_every_part_of_the_benchmark_gives_its_figures(tmp_path: Path, device: str) -> None:
    """Everything but TRL, which has an environment of its own."""
    work = replace(WORK, dtype="bfloat16", device=device)
    figures = GpuBench(tmp_path, work, 600.0, memory_bytes=None, say=lambda text: None).run({"tiny": {**TINY, "vocab_size": 512}})
    why_not = [row for row in figures["results"] if "why_not" in row]
    assert [row.get("variant") for row in why_not] == ["TRL"], why_not
    (tail,) = (row for row in figures["results"] if row.get("long_tail"))
    assert device == "cpu" or tail["graphs"] > 1


def test_between_two_looks_nothing_waits_for_the_device(device: str) -> None:
    """torch raises where an operation makes the host wait; reading the tokens, once in a window, is the one that may."""
    model_rows = [Growing(Rollout(Prompt(i, i, "", (5,)), admission=0), 100, 0) for i in range(7)]
    with decoding(device, "bfloat16", "dense", 16) as (model, rounds):
        assert rounds.decode is not None
        cache, run = rounds.decode.cache, rounds.decode.captured or run_eagerly
        lane = DeviceLane(model, cache, run, sampling=Sampling(seed=3), eos_ids=(2,), sync_steps=16, name=1)
        for row in model_rows:
            cache.open(row.seq_id)
        lane.load(model_rows, 0, 48)
        lane.start(model_rows)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                lane.start(model_rows)
                rows, drawn = lane.read()
                assert rows == model_rows and drawn.shape == (16, 4, 7)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def test_paged_attention_by_this_machines_kernel_equals_gathered_attention(device: str) -> None:
    place, dtype = torch.device(device), torch.bfloat16
    kernel = find_kernel(place, dtype)
    if kernel is None:
        pytest.skip("no kernel for paged attention: install flash-attn 2 or triton with a C compiler")
    generator = torch.Generator(place).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=place, dtype=dtype)

    angles = torch.randn(700, 64, generator=generator, device=place)
    sizes: dict[str, Any] = {
        "num_layers": 1, "num_kv_heads": 2, "head_dim": 64, "num_slots": 3, "max_length": 700, "dtype": dtype,
        "rope": (angles.cos(), angles.sin()), "device": place,
    }  # fmt: skip
    caches, sinks = (PagedKVCache(**sizes), PagedKVCache(**sizes, kernel=kernel)), torch.linspace(-2, 4, 8, device=place)
    for cache in caches:
        for seq_id in range(3):
            cache.open(seq_id)
    for lens in ([600, 3, 257], [1, 1, 1], [5, 90, 1], [1, 1, 1]):
        q, k, v = random(sum(lens), 8, 64), random(sum(lens), 2, 64), random(sum(lens), 2, 64)
        outputs = []
        for cache in caches:
            plan = cache.begin(range(3), lens)
            outputs += [plan.attend(0, q, k, v, 64**-0.5, window).float() for window in (None, 1, 100)]
            qkv = torch.cat([q.view(-1, 2, 4, 64), k.unsqueeze(2), v.unsqueeze(2)], 2)  # rotated by the kernel, too
            outputs += [plan.attend_grouped(0, qkv, Reading(64**-0.5, window, sinks=sinks)).float() for window in (None, 100)]
            cache.commit(plan)
        for gathered, by_kernel in zip(outputs[:5], outputs[5:], strict=True):
            assert float((gathered - by_kernel).abs().max()) < 0.02


@pytest.mark.parametrize("window", [None, 100])
def test_gradients_under_sinks_are_those_of_composed_attention(device: str, window: int | None) -> None:
    """The kernel's backward pass has to read the output and log-sums that sinks have changed."""
    lengths, generator = [600, 3, 257], torch.Generator(device).manual_seed(1)
    rope = torch.ones(700, 64, device=device), torch.zeros(700, 64, device=device)
    sizes = [(sum(lengths), heads, 64) for heads in (8, 2, 2, 8)]
    *given, weights = (torch.randn(size, generator=generator, device=device).bfloat16() for size in sizes)
    given.append(torch.linspace(-2, 4, 8, device=device).bfloat16())
    found = []
    for dtype in (torch.bfloat16, torch.float32):  # no kernel takes the latter
        own = [x.detach().to(dtype).requires_grad_() for x in given]
        out = PackedPlan(lengths, rope).attend(0, *own[:3], 64**-0.5, window, sinks=own[3])
        (out.float() * weights.float().flatten(1)).sum().backward()
        found.append([out.detach().float(), *(x.grad.float() for x in own)])
    for ours, exact in zip(*found, strict=True):
        assert float((ours - exact).norm() / exact.norm()) < 0.02


def _run(config: TrainConfig, device: str) -> Outcome:
    with open_world(config.runtime) as world:
        assert world.device.type == device and not dist.get_rank()
        run_ppo(config, world, read_inputs(config), Preemption(config.preempt_deadline_s))
    return read_outcome(config.run_dir)
