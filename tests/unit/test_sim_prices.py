"""Clusters as `cluster.yaml` gives them, and seconds of roles and phases on one: laws that follow from each other."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.prices import main as prices
from benchmarks.published.tables import SHAPES
from oppo_megatron.config.model import TrainingLayoutConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.memory import expert_weights, stage_parameters
from oppo_megatron.layout.placements import RolePlacement
from oppo_megatron.schedule.weaving.costs import read_costs
from oppo_megatron.sim.clusters.cluster import GPUS, H100_LAWS, INSIDE, Between, Cluster, Efficiencies, Line, published, threaded
from oppo_megatron.sim.clusters.reading import read_cluster
from oppo_megatron.sim.laws import Group, scatter_s
from oppo_megatron.sim.pricing.model import Decoding, LaidModel, Tokens, Turns, decode_costs, decode_s, line_through
from oppo_megatron.sim.pricing.prices import Batch, Update, Weights, inference_s, reallocation_s, update_s

TWO = "nodes: 2\ngpu: h100\nbetween: {gb_per_s: 50, nics: 8}\n"
NUMBERS = "gpu: {memory_gb: 96, tflops: 500, gb_per_s: 2000}\ninside: {alpha_us: 16, gb_per_s: 200}\n"


def cluster_of(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return read_cluster(path)


def test_names_give_published_constants_numbers_stand_for_a_gpu_and_all_have_a_source(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, TWO)
    assert (cluster.num_ranks, cluster.node_of(7), cluster.node_of(8)) == (16, 0, 1)
    assert cluster.gpu is GPUS["h100"] and cluster.inside is INSIDE["h100"]
    assert cluster.between is not None and cluster.between.node_bytes_per_s == 400e9
    cluster = cluster_of(tmp_path, NUMBERS + "gpus_per_node: 4\n")
    assert (cluster.gpu.flops, cluster.gpu.bytes_per_s, cluster.gpu.memory_bytes) == (500e12, 2000e9, 96e9)
    assert cluster.gpu.efficiencies == H100_LAWS and cluster.inside.of_ranks(2) == Line(16e-6, 200e9)
    assert cluster.between is None
    for text in (TWO, NUMBERS, *(f"gpu: {name}\n" for name in GPUS)):
        sources = dict(cluster_of(tmp_path, text).sources())
        constants = {"gpu.flops", "gpu.bytes_per_s", "gpu.memory_bytes", "gpu.efficiencies", "inside"}
        assert constants <= sources.keys() and all(source.where for source in sources.values())
    assert sources["gpu.efficiencies"].kind == "assumed"  # the last one is a CPU
    given = dict(cluster_of(tmp_path, NUMBERS).sources())
    assert str(given["gpu.flops"]) == "given: `gpu.tflops` of cluster.yaml" and given["inside"].kind == "given"
    assert dict(cluster_of(tmp_path, "gpu: h200\n").sources())["gpu.efficiencies"].kind == "assumed"


SEND = {"alpha_s": 1e-5, "bytes_per_s": 1e11}
LAWS = {"compute": 0.6, "memory": 0.7, "fixed_s": 1e-5, "power": 2, "elementwise": 0.5, "elementwise_fixed_s": 0, "plain": 0.8}


def measured_cluster(folder: Path, tree: object) -> Cluster:
    (folder / "mine.json").write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return cluster_of(folder, TWO + "measured: mine.json\n")


def test_a_measured_file_replaces_constants(tmp_path: Path) -> None:
    cluster = measured_cluster(tmp_path, {"source": "here", "efficiencies": LAWS, "collective": {"8": SEND}})
    assert cluster.gpu.efficiencies == Efficiencies(**LAWS)
    assert cluster.inside.of_ranks(4) == Line(**SEND) and cluster.inside.send == INSIDE["h100"].send
    sources = dict(cluster.sources())
    assert str(sources["gpu.efficiencies"]) == str(sources["inside"]) == "measured: here"
    assert sources["gpu.flops"].kind == "published"


@pytest.mark.parametrize(("text", "words"), [
    ("gpu: h10\n", ["`gpu`", "'h10'", "h100"]),
    ("gpu: {memory_gb: 80, tflops: 989, gb_per_s: 0}\n", ["`gpu.gb_per_s`", "0", "greater than or equal to 0.001"]),
    ("gpu: h100\nnodes: 2\nbetween: {gb_per_s: 0}\n", ["`between.gb_per_s`", "greater than or equal to 0.001"]),
    ("gpu: h100\nnodes: 2\nbetween: {gb_per_s: 50, nics: 0}\n", ["`between.nics`", "greater than 0"]),
    ("gpu: h100\nnodes: 0\n", ["`nodes`", "0", "greater than or equal to 1"]),
    ("gpu: h100\nnodes: 2\n", ["nodes is 2", "add `between"]),
    ("gpu: {memory_gb: 80, tflops: 989, gb_per_s: 3000}\n", ["gpus_per_node is 8", "add `inside"]),
    ("nodes: 1\n", ["`gpu` is missing"]), ("gpu: h100\nmeasured: no.json\n", ["no.json", "does not exist"]),
    ("gpu: h100\ngpus: 8\n", ["`gpus` is not a setting", "gpu"]),
    ("gpu: {memory_gb: -1, tflops: 989, gb_per_s: 3000}\ngpus_per_node: 1\n", ["`gpu.memory_gb`", "-1"]),
    ("gpu: h100\ninside: {gb_per_s: .inf}\n", ["`inside.gb_per_s`", "finite"]),
    ("gpu: h100\nnodes: 60000\nbetween: {gb_per_s: 50}\n", ["480000 ranks", "at most 65536"]),
    ("gpu: h100\nmeasured: .\n", ["is a folder, but must be a file"]),
])  # fmt: skip
def test_mistakes_are_told_with_value_rule_and_remedy(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        cluster_of(tmp_path, text)
    assert all(word in str(error.value) for word in words), str(error.value)


RATES = ["between.gb_per_s", "inside.gb_per_s", "gpu.memory_gb", "gpu.tflops", "gpu.gb_per_s"]
ABSURD = ["0", "-1", ".nan", ".inf", "1e-300", "5e-324", "1e300", "true", "fast", "[]"]


@pytest.mark.parametrize("key", [*RATES, "between.alpha_us", "between.nics", "nodes", "gpus_per_node"])
def test_absurd_numbers_are_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(TWO.replace("h100", NUMBERS.partition("\n")[0].removeprefix("gpu: ")) + NUMBERS.splitlines()[1] + "\n")
    assert read_cluster(path).num_ranks == 16
    for value in ABSURD if key != "between.alpha_us" else sorted({*ABSURD} - {"0", "1e-300", "5e-324"}):
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            read_cluster(path, [f"{key}={value}"])


@pytest.mark.parametrize(("key", "values"), [
    ("efficiencies.compute", [0, -1, 1e-300, 3, True, "x"]), ("efficiencies.power", [0, 17, 1e300]),
    ("send.bytes_per_s", [0, 1e-300, 1e300, "x"]), ("send.alpha_s", [-1, 1e300, True]),
    ("engine.decode", [-1, 1e300, float("nan"), True]), ("threads.2", [0, 1e-300, 1e300, True]), ("threads.0", [1.0]),
    ("collective.1", [SEND]), ("collective", [[], 3]),
])  # fmt: skip
def test_absurd_measured_numbers_are_refused(tmp_path: Path, key: str, values: list[object]) -> None:
    tree: dict[str, Any] = {
        "source": "here", "send": SEND, "threads": {"2": 1.9}, "collective": {}, "efficiencies": LAWS,
        "engine": {"launch_s": 1e-4, "replay_s": 1e-4, "decode": 1.0, "read": 1.0, "update": 1.0},
    }  # fmt: skip
    measured_cluster(tmp_path, tree)
    section, _, name = key.partition(".")
    for value in values:
        with pytest.raises(ConfigError, match=r"mine\.json: "):
            measured_cluster(tmp_path, tree | {section: tree[section] | {name: value} if name else value})


@pytest.mark.parametrize("text", ["{", "[]", "", "3", '"x"', '{"source": "x", "send": {"alpha_s": 0}}', '{"source": ""}'])
def test_a_broken_measured_file_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.json: "):
        measured_cluster(tmp_path, text)


def test_ranks_share_the_cores_of_a_node(tmp_path: Path) -> None:
    cores = cluster_of(tmp_path, "gpus_per_node: 8\ngpu: cpu\n")
    assert threaded(cores, 8, 0) == cores
    two = threaded(cores, 4, 0)
    assert two.gpu.flops == pytest.approx(1.9 * cores.gpu.flops)
    assert two.gpu.memory_bytes == 2 * cores.gpu.memory_bytes and "threads" in two.gpu.sources
    assert threaded(cores, 4, 1).gpu.flops == cores.gpu.flops
    gpus = cluster_of(tmp_path, "gpu: h100\n")
    assert threaded(gpus, 1, 0) == gpus


H100, NETWORK = GPUS["h100"], Between(19e-6, 50e9, 8, published("a test"))
CLUSTER = Cluster(4, 8, H100, INSIDE["h100"], NETWORK)
FASTER = {
    "flops": replace(CLUSTER, gpu=replace(H100, flops=2 * H100.flops)),
    "bytes": replace(CLUSTER, gpu=replace(H100, bytes_per_s=2 * H100.bytes_per_s)),
    "network": replace(CLUSTER, between=replace(NETWORK, bytes_per_s=100e9)),
}


def laid(tp: int, pp: int, dp: int, *, cluster: Cluster = CLUSTER, model: str = "7B", first: int = 0) -> LaidModel:
    return LaidModel(cluster, SHAPES[model], False, RolePlacement(tuple(range(first, first + tp * pp * dp)), tp, pp, dp))


FREE = Turns(10**6)
"""Caches that hold all sequences."""
LAYOUTS = [sizes for sizes in product((1, 2, 4, 8), (1, 2, 4), (1, 2)) if np.prod(sizes) <= 32]


@settings(max_examples=20)
@given(st.sampled_from(LAYOUTS), st.sampled_from(sorted(FASTER)), st.integers(1, 64))
def test_a_better_cluster_is_never_slower_nor_a_larger_batch_faster(layout: Any, better: str, sequences: int) -> None:
    batch, train = Batch(1500.0 * sequences, 1500.0, 8192), TrainingLayoutConfig(recompute="full")
    slow, fast, lengths = laid(*layout), laid(*layout, cluster=FASTER[better]), [17 * i + 1 for i in range(sequences)]
    assert inference_s(fast, batch) <= inference_s(slow, batch) <= inference_s(slow, replace(batch, tokens=2 * batch.tokens))
    assert update_s(fast, Update(batch, 4, train)) <= update_s(slow, Update(batch, 4, train))
    once = decode_s(slow, Decoding(512, lengths), FREE) * (1 + 1e-9)
    assert decode_s(fast, Decoding(512, lengths), FREE) <= once <= decode_s(slow, Decoding(512, lengths * 2), FREE) * (1 + 2e-9)


def test_training_costs_what_its_passes_do() -> None:
    """Three forwards without recomputation; a fourth with it; a pipeline's bubble is divided by its virtual stages."""
    one, batch = laid(1, 1, 1), Batch(8 * 8192.0, 2048.0, 8192)
    none, full = TrainingLayoutConfig(recompute="none"), TrainingLayoutConfig(recompute="full")
    tokens = batch.micro_batch(outputs=True)
    forward, head = one.forward_s(0, tokens), one.head_s(0, tokens.rows)
    plain, again = update_s(one, Update(batch, 2, none)), update_s(one, Update(batch, 2, full))
    assert again - plain == pytest.approx(2 * 8 * (forward - head))
    state = 28 * stage_parameters(one.shape, 1, 1, 0, scalar=False) / (0.96 * CLUSTER.gpu.bytes_per_s)
    assert plain == pytest.approx(2 * (8 * 3 * forward + state))
    four = laid(1, 4, 1)
    with_stages = update_s(four, Update(batch, 1, none))
    interleaved = update_s(four, Update(batch, 1, TrainingLayoutConfig(vpp=2)))
    stages = [3 * four.forward_s(stage, tokens) for stage in range(4)]
    assert with_stages - interleaved == pytest.approx((sum(stages) - max(stages)) / 2)
    update = Update(batch, 1, none)
    assert update_s(laid(8, 1, 1), update) < update_s(laid(8, 1, 4), update), "gradients between nodes take time"


def test_ranks_that_share_sequences_compute_a_half_each_and_gather_keys_and_values() -> None:
    batch, model = Batch(8 * 8192.0, 8192.0, 8192), replace(laid(1, 1, 1), placement=RolePlacement((0, 1), cp=2))
    tokens = batch.micro_batch(outputs=True)
    half = Tokens(tokens.new / 2, tokens.pairs / 2, 0.0, tokens.rows / 2)
    gather = 32 * scatter_s(CLUSTER, Group(2, 1, 4), 2 * 2 * 1024 * 8192.0)  # layers; bytes, keys and values, width
    plain, again = (update_s(model, Update(batch, 1, TrainingLayoutConfig(recompute=how))) for how in ("none", "selective"))
    assert again - plain == pytest.approx(8 * (model.attention_s(half) + gather))
    alone = update_s(laid(1, 1, 1), Update(batch, 1, TrainingLayoutConfig()))
    assert 8 * (3 * model.forward_s(0, half) + 2 * gather) < plain < 0.6 * alone


def test_replicas_that_divide_experts_pass_pairs_twice_in_each_pass_and_reduce_fewer_weights() -> None:
    shape = SHAPES["7B"] | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 512, "num_experts_per_tok": 2}
    batch, model = Batch(8 * 8192.0, 8192.0, 8192), replace(laid(1, 1, 1), shape=shape)
    laid_out = [replace(model, placement=RolePlacement((0, 1), dp=2, ep=ep)) for ep in (1, 2)]
    ways = [TrainingLayoutConfig(recompute=how) for how in ("none", "full")]
    plain, full = ([update_s(each, Update(batch, 1, way)) for each in laid_out] for way in ways)
    once = 32 * scatter_s(CLUSTER, Group(2, 1, 4), 2 * 2 * 4096 * 8192.0)  # layers; bytes, experts of a token, width
    assert (full[1] - full[0]) - (plain[1] - plain[0]) == pytest.approx(8 * 2 * once)
    experts = 32 * 8 * 3 * 512 * 4096
    assert expert_weights(shape) * 32 == experts
    fewer = scatter_s(CLUSTER, Group(2, 1, 4), 2 * experts / 2)  # gathered weights; gradients hide behind the backward pass
    assert plain[1] - plain[0] == pytest.approx(8 * 4 * once - fewer, rel=1e-3)


def test_decode_steps_sum_over_the_lengths_and_sequences_without_a_slot_wait_for_the_next_round() -> None:
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
    # Twice as many as there are slots take twice as long; each starts when a round begins after a slot is free
    assert Turns(2, 8).starts(np.array([5, 17, 3, 8, 1])).tolist() == [0, 0, 8, 16, 24]
    assert Turns(9, 8).starts(np.array([5, 17, 3])).tolist() == [0, 0, 0]
    model, decoding = laid(8, 1, 1), Decoding(512, [1000] * 64)
    assert decode_s(model, decoding, Turns(32, 100)) == pytest.approx(2 * decode_s(model, Decoding(512, [1000] * 32), FREE))
    assert decode_s(model, decoding, Turns(32, 700)) > 1.19 * decode_s(model, decoding, Turns(32, 100))
    # Decode micro-batches that are asked for are priced.
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
    moved = reallocation_s(CLUSTER, shape, Weights(RolePlacement((0, 1), 1, 2, 1), vpp=2), halves, scalar=False)
    assert moved == pytest.approx(seconds / 2, rel=0.2)  # half of each stage's layers
    mixture = shape | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 512, "num_experts_per_tok": 2}
    divided = Weights(RolePlacement((0, 1), dp=2, ep=2))
    seconds = reallocation_s(CLUSTER, mixture, divided, placed(1, 1, 2), scalar=False)
    assert seconds == pytest.approx(2 * 32 * expert_weights(mixture) / 2 / 357.5e9, rel=0.01), "the other replica's experts"
    # A replica on each node in both layouts: nothing passes the network, so its bandwidth does not count.
    networks = (CLUSTER, replace(CLUSTER, between=replace(NETWORK, bytes_per_s=1e6)))
    usual, slow = (reallocation_s(each, shape, placed(8, 1, 2), placed(1, 1, 16), scalar=False) for each in networks)
    assert usual == slow > 0


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


def test_the_command_prices_every_phase_or_refuses_a_small_cluster(described: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prices(["c.yaml", "--cluster", "cluster.yaml", "--costs", "costs.json"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[1:9]] == [
        ["actor", "prompts"], ["actor", "decode"], ["reference", "score"], ["critic", "score"], ["reward", "score"],
        ["actor", "update"], ["actor", "weights"], ["critic", "update"],
    ]  # fmt: skip
    assert "the fullest rank holds" in out and "gpu.efficiencies: published" in out and "host: published: ReaL" in out
    placement = RolePlacement(tuple(range(16)), 8, 2, 1)
    costs = read_costs(described / "costs.json", dict.fromkeys(("actor", "reference", "critic", "reward"), placement))
    assert len(json.loads((described / "costs.json").read_text())["decode"]) == 2
    assert costs.decode_at(0)(64) > 16 * 0.15e-3 and costs.prefill_at("reward", 1)(4096) > 16 * 0.5e-3
    (described / "cluster.yaml").write_text("gpu: h100\n")
    assert prices(["c.yaml", "--cluster", "cluster.yaml"]) == 2
    assert "16 ranks, but the cluster 8 (1 x 8); add nodes" in capsys.readouterr().err
