"""Seconds of roles and phases on a cluster: laws that follow from each other, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.prices import main as prices
from benchmarks.published.tables import SHAPES
from oppo_megatron.config.model import TrainingLayoutConfig
from oppo_megatron.layout.memory import stage_parameters
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.weaving.costs import read_costs
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, Between, Cluster, published
from oppo_megatron.sim.pricing.model import Decoding, LaidModel, Tokens, Turns, decode_costs, decode_s, line_through
from oppo_megatron.sim.pricing.prices import Batch, Update, Weights, inference_s, reallocation_s, update_s

CLUSTER = Cluster(4, 8, GPUS["h100"], INSIDE["h100"], Between(19e-6, 50e9, 8, published("a test")))
FASTER = {
    "flops": replace(CLUSTER, gpu=replace(CLUSTER.gpu, flops=2 * CLUSTER.gpu.flops)),
    "bytes": replace(CLUSTER, gpu=replace(CLUSTER.gpu, bytes_per_s=2 * CLUSTER.gpu.bytes_per_s)),
    "network": replace(CLUSTER, between=Between(19e-6, 100e9, 8, published("a test"))),
}


def laid(tp: int, pp: int, dp: int, *, cluster: Cluster = CLUSTER, model: str = "7B", first: int = 0) -> LaidModel:
    ranks = tuple(range(first, first + tp * pp * dp))
    return LaidModel(cluster, SHAPES[model], False, RolePlacement(ranks, tp, pp, dp))


FREE = Turns(10**6)
"""Caches that hold all sequences."""
LAYOUTS = st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])).filter(
    lambda sizes: sizes[0] * sizes[1] * sizes[2] <= 32
)


@settings(max_examples=20)
@given(LAYOUTS, st.sampled_from(sorted(FASTER)), st.integers(1, 64))
def test_a_better_cluster_is_never_slower(layout: tuple[int, int, int], better: str, sequences: int) -> None:
    batch, train = Batch(1500.0 * sequences, 1500.0, 8192), TrainingLayoutConfig(recompute="full")
    slow, fast = laid(*layout), laid(*layout, cluster=FASTER[better])
    assert inference_s(fast, batch) <= inference_s(slow, batch)
    assert update_s(fast, Update(batch, 4, train)) <= update_s(slow, Update(batch, 4, train))
    decoding = Decoding(512, [17 * i + 1 for i in range(sequences)])
    assert decode_s(fast, decoding, FREE) <= decode_s(slow, decoding, FREE) * (1 + 1e-9)


@settings(max_examples=20)
@given(LAYOUTS, st.integers(1, 48))
def test_a_larger_batch_is_never_shorter(layout: tuple[int, int, int], sequences: int) -> None:
    model, lengths = laid(*layout), [100 + 31 * i for i in range(sequences)]
    once, twice = Batch(1000.0 * sequences, 1000.0, 8192), Batch(2000.0 * sequences, 1000.0, 8192)
    assert inference_s(model, once) <= inference_s(model, twice)
    assert decode_s(model, Decoding(256, lengths), FREE) <= decode_s(model, Decoding(256, lengths * 2), FREE) * (1 + 1e-9)


def test_training_costs_what_its_passes_do() -> None:
    """Three forwards without recomputation; a fourth with it; a pipeline's bubble is divided by its virtual stages."""
    one, batch = laid(1, 1, 1), Batch(8 * 8192.0, 2048.0, 8192)
    none, full = TrainingLayoutConfig(recompute="none"), TrainingLayoutConfig(recompute="full")
    tokens = batch.micro_batch(outputs=True)
    forward, head = one.forward_s(0, tokens), one.head_s(0, tokens.rows)
    plain, again = update_s(one, Update(batch, 2, none)), update_s(one, Update(batch, 2, full))
    assert again - plain == pytest.approx(2 * 8 * (forward - head))
    gpu = CLUSTER.gpu
    state = 28 * stage_parameters(one.shape, 1, 1, 0, scalar=False) / (0.96 * gpu.bytes_per_s)
    assert plain == pytest.approx(2 * (8 * 3 * forward + state))
    four = laid(1, 4, 1)
    with_stages = update_s(four, Update(batch, 1, none))
    interleaved = update_s(four, Update(batch, 1, TrainingLayoutConfig(vpp=2)))
    stages = [3 * four.forward_s(stage, tokens) for stage in range(4)]
    assert with_stages - interleaved == pytest.approx((sum(stages) - max(stages)) / 2)
    update = Update(batch, 1, none)
    assert update_s(laid(8, 1, 1), update) < update_s(laid(8, 1, 4), update), "gradients between nodes take time"


def test_decode_steps_sum_over_the_lengths() -> None:
    """Equal lengths: steps times one step.  Ragged ones lie between the shortest and the longest, nearer to their mean."""
    model, count = laid(8, 1, 1), 64
    step = model.step_s(0, Tokens.step(count, count * (512 + 500)), captured=True)
    costs = decode_costs(model, count, 512 + 500, captured=True)
    assert costs.decode_at(0)(count) == pytest.approx(step)
    whole = decode_s(model, Decoding(512, [1000] * count), FREE)
    assert whole == pytest.approx(1000 * (step + costs.sample(count)), rel=0.01)
    ragged = decode_s(model, Decoding(512, [500] * 32 + [1000] * 32), FREE)
    assert decode_s(model, Decoding(512, [500] * count), FREE) < ragged < whole
    launched = decode_s(model, Decoding(512, [1000] * count, captured=False), FREE)
    assert launched - whole == pytest.approx(1000 * 32 * 0.5e-3, rel=0.01)


def test_sequences_without_a_slot_wait_for_the_next_round() -> None:
    """Twice as many as there are slots take twice as long; each starts when a round begins after a slot is free."""
    assert Turns(2, 8).starts(np.array([5, 17, 3, 8, 1])).tolist() == [0, 0, 8, 16, 24]
    assert Turns(9, 8).starts(np.array([5, 17, 3])).tolist() == [0, 0, 0]
    model, decoding = laid(8, 1, 1), Decoding(512, [1000] * 64)
    assert decode_s(model, decoding, Turns(32, 100)) == pytest.approx(2 * decode_s(model, Decoding(512, [1000] * 32), FREE))
    assert decode_s(model, decoding, Turns(32, 700)) > 1.19 * decode_s(model, decoding, Turns(32, 100))


def test_decode_micro_batches_that_are_asked_for_are_priced() -> None:
    model, decoding = laid(8, 1, 1), Decoding(512, [1000] * 64)
    one, four = (decode_s(model, decoding, Turns(64, 1, count)) for count in (1, 4))
    assert four == pytest.approx(4 * decode_s(model, Decoding(512, [1000] * 16), FREE), rel=0.02) and four > 2 * one


@given(st.floats(1, 100), st.floats(0, 1), st.floats(1, 100), st.floats(0, 1))
def test_lines_never_fall_and_never_start_below_zero(few: float, few_s: float, more: float, more_s: float) -> None:
    line = line_through(few, few_s, few + more, few_s + more_s)
    assert line.fixed_s >= 0 and line.per_token_s >= 0
    assert line.fixed_s + (few + more) * line.per_token_s >= few_s + more_s - 1e-9


def placed(tp: int, pp: int, dp: int) -> Weights:
    return Weights(RolePlacement(tuple(range(tp * pp * dp)), tp, pp, dp))


def test_a_move_takes_what_its_bytes_do() -> None:
    shape = SHAPES["7B"]
    assert reallocation_s(CLUSTER, shape, placed(2, 4, 2), placed(2, 4, 2), scalar=False) == 0.0
    assert reallocation_s(CLUSTER, shape, placed(1, 1, 8), placed(1, 1, 8), scalar=True) == 0.0
    num_bytes = 2 * stage_parameters(shape, 1, 1, 0, scalar=False)
    one = Weights(RolePlacement((0,), 1, 1, 1))
    halves = Weights(RolePlacement((0, 1), 1, 2, 1))
    seconds = reallocation_s(CLUSTER, shape, one, halves, scalar=False)
    assert seconds == pytest.approx(num_bytes / 2 / 357.5e9, rel=0.01)
    away = Weights(RolePlacement(tuple(range(8, 16)), 8, 1, 1))
    assert reallocation_s(CLUSTER, shape, one, away, scalar=False) == pytest.approx(num_bytes / (0.94 * 400e9), rel=0.02)
    interleaved = Weights(RolePlacement((0, 1), 1, 2, 1), vpp=2)
    moved = reallocation_s(CLUSTER, shape, interleaved, halves, scalar=False)
    assert moved == pytest.approx(seconds / 2, rel=0.2)  # half of each stage's layers


def test_replicas_on_a_node_give_what_another_lacks() -> None:
    """A replica on each node in both layouts: nothing passes the network, so its bandwidth does not count."""
    slow = replace(CLUSTER, between=Between(19e-6, 1e6, 8, published("a test")))
    seconds = [
        reallocation_s(cluster, SHAPES["7B"], placed(8, 1, 2), placed(1, 1, 16), scalar=False) for cluster in (CLUSTER, slow)
    ]
    assert seconds[0] == seconds[1] > 0


CONFIG = """
run_dir: run
steps: 2
placement: {mode: colocated, actor: {tp: 8, pp: 2}}
runtime: {device: cpu, dtype: bfloat16, micro_batch_tokens: 4096}
tokenizer: {path: tok}
data: {path: rows.jsonl, max_prompt_tokens: 256}
actor: {init: &shape {model_type: llama, vocab_size: 32000, hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 32,
                      num_attention_heads: 32, max_position_embeddings: 2048}, train: {tp: 4, pp: 4}}
critic: {init: *shape}
reward: {init: *shape}
rewards: [{kind: model}]
rollout: {batch_size: 64, max_response_tokens: 1024, forced_lengths: [256, 1.0]}
"""


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1"}\n')
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "cluster.yaml").write_text("nodes: 2\ngpu: h100\nbetween: {gb_per_s: 50}\n")
    return tmp_path


def test_the_command_prices_every_phase(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prices(["c.yaml", "--cluster", "cluster.yaml", "--costs", "costs.json"]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[:2] for line in out.splitlines()[1:9]]
    assert rows == [
        ["actor", "prompts"], ["actor", "decode"], ["reference", "score"], ["critic", "score"], ["reward", "score"],
        ["actor", "update"], ["actor", "weights"], ["critic", "update"],
    ]  # fmt: skip
    assert "the fullest rank holds" in out and "gpu.efficiencies: published" in out and "host: published: ReaL" in out
    placement = RolePlacement(tuple(range(16)), 8, 2, 1)
    costs = read_costs(described / "costs.json", dict.fromkeys(("actor", "reference", "critic", "reward"), placement))
    assert len(json.loads((described / "costs.json").read_text())["decode"]) == 2
    assert costs.decode_at(0)(64) > 16 * 0.15e-3 and costs.prefill_at("reward", 1)(4096) > 16 * 0.5e-3


def test_a_cluster_that_is_too_small_is_refused(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (described / "cluster.yaml").write_text("gpu: h100\n")
    assert prices(["c.yaml", "--cluster", "cluster.yaml"]) == 2
    assert "16 ranks, but the cluster 8 (1 x 8); add nodes" in capsys.readouterr().err
