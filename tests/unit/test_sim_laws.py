"""The laws of layers, messages and moves against measurements that others have published."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fitting.comparing import fit_lines
from benchmarks.fitting.laws import elementwise_of, fit_layers, mean_error, products_of
from benchmarks.fitting.points import LayerPoint, read_collectives, read_layers
from benchmarks.limit import forward_flops
from benchmarks.machine import main
from benchmarks.published.points import SERVING, TRAINING, serving_by_law, training_by_law
from benchmarks.published.tables import SHAPES
from oppo_megatron.errors import DataError
from oppo_megatron.layout.shape import causal_pairs
from oppo_megatron.sim.clusters.cluster import GPUS, INSIDE, MOST_POWER, Between, Cluster, Line, published
from oppo_megatron.sim.clusters.reading import read_cluster
from oppo_megatron.sim.laws import Group, LayerLaw, LayerSizes, Moves, all_reduce_s, ring_efficiency, scatter_s, send_s

GOLDEN = Path(__file__).parent / "golden" / "laws"
LAYERS, COLLECTIVES = GOLDEN / "layers.csv", GOLDEN / "collectives.csv"
FITTED = {"a100-80": ("Meta-Llama-3-8B", "Meta-Llama-3-70B"), "h100": ("Llama-2-7b-hf", "Llama-2-70b-hf")}
OTHERS = {
    "a100-80": ("CodeLlama-34b-Instruct-hf", "Llama-2-70b-hf", "Llama-2-7b-hf", "Qwen-72B", "internlm-20b"),
    "h100": ("CodeLlama-34b-Instruct-hf", "Qwen-72B", "internlm-20b"),
}
STATED = [("a100-80", FITTED["a100-80"], 0.036, 0.085), ("h100", FITTED["h100"], 0.061, 0.099)]
STATED += [(gpu, (model,), most, 0.12) for gpu, most in (("a100-80", 0.055), ("h100", 0.07)) for model in OTHERS[gpu]]
"""Constants were fitted to the first two."""
NETWORK = Between(19e-6, 50e9, 8, published("a test"))


def cluster_of(nodes: int = 16, between: Between = NETWORK) -> Cluster:
    return Cluster(nodes, 8, GPUS["h100"], INSIDE["h100"], between)


def points_of(gpu: str, models: tuple[str, ...]) -> list[LayerPoint]:
    return [point for point in read_layers(LAYERS) if point.gpu == gpu and point.model in models]


def errors_of(law: LayerLaw, points: list[LayerPoint]) -> tuple[float, float]:
    products = mean_error(products_of(law, points), [point.products_us for point in points])
    return products, mean_error(elementwise_of(law, points), [point.elementwise_us for point in points])


@pytest.mark.parametrize(("gpu", "models", "most_products", "most_elementwise"), STATED)
def test_layers_of_models(gpu: str, models: tuple[str, ...], most_products: float, most_elementwise: float) -> None:
    products, elementwise = errors_of(LayerLaw(GPUS[gpu]), points_of(gpu, models))
    assert products < most_products and elementwise < most_elementwise


def test_tokens_share_the_experts_that_they_read() -> None:
    """Operations count a token's experts, bytes all experts that some token chose; tensor ranks divide both."""
    shape = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    }  # fmt: skip
    attention, expert = (2 * 32 + 2 * 4) * 128 * 2048, 3 * 2048 * 768
    dice = np.random.default_rng(1)
    for tp in (1, 4):
        sizes = LayerSizes.of(shape, tp)
        assert sizes.product_flops(5) == 2 * 5 * (attention + 8 * expert) / tp
        for tokens in (1, 7, 64):
            chosen = [len({int(e) for _ in range(tokens) for e in dice.choice(128, 8, replace=False)}) for _ in range(200)]
            weights = sizes.product_bytes(tokens) / 2 - sizes.moved * tokens
            assert weights == pytest.approx((attention + float(np.mean(chosen)) * expert) / tp, rel=0.01)
    dense = LayerSizes.of(shape | {"model_type": "qwen3"}, 1)
    assert dense.others == 0 and dense.product_bytes(9) / 2 - 9 * dense.moved == attention + 3 * 2048 * 6144


def line_of(gpu: str, operation: str, ranks: int) -> Line:
    found = INSIDE[gpu].send if operation == "send_recv" else INSIDE[gpu].of_ranks(ranks)
    assert isinstance(found, Line)
    return found


def calibration(shared_data: Path, name: str) -> list[dict[str, str]]:
    with (shared_data / "calibration" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


NAMED = {"A100-80GB": "a100-80", "H100-80GB": "h100"}


def test_constants_are_those_of_the_calibration(shared_data: Path) -> None:
    fitted = [row for row in calibration(shared_data, "gemm_law.csv") if row["gpu"] in NAMED]
    assert len(fitted) == 2
    for row in fitted:
        gpu = GPUS[NAMED[row["gpu"]]]
        by = gpu.efficiencies
        assert (gpu.flops, gpu.bytes_per_s) == (float(row["peak_flops"]), float(row["peak_bytes_per_s"]))
        assert (by.compute, by.memory) == (float(row["compute_efficiency"]), float(row["memory_efficiency"]))
        assert (by.power, by.elementwise) == (float(row["power"]), float(row["elementwise_memory_efficiency"]))
        fixed = [float(row["fixed_us"]), float(row["elementwise_fixed_us"])]
        assert [1e6 * by.fixed_s, 1e6 * by.elementwise_fixed_s] == pytest.approx(fixed)
    lines = [row for row in calibration(shared_data, "collectives.csv") if row["ranks"] == row["ranks_per_node"]]
    assert len(lines) == 8
    for row in lines:
        line = line_of(NAMED[row["gpu"]], row["operation"], int(row["ranks"]))
        assert [1e6 * line.alpha_s, line.bytes_per_s / 1e9] == pytest.approx([float(row["alpha_us"]), float(row["busbw_gb_s"])])


def test_collectives_within_a_node_and_the_measured_bandwidths_of_an_h200(shared_data: Path) -> None:
    for gpu, most in (("a100-80", 0.17), ("h100", 0.15)):
        points = [point for point in read_collectives(COLLECTIVES) if point.gpu == gpu and point.ranks == point.ranks_per_node]
        for operation, ranks in sorted({(point.operation, point.ranks) for point in points}):
            chosen = [point for point in points if (point.operation, point.ranks) == (operation, ranks)]
            law = line_of(gpu, operation, ranks)
            predicted = np.array([1e6 * law.seconds(point.bytes, point.factor) for point in chosen])
            assert mean_error(predicted, [point.us for point in chosen]) < most, (gpu, operation, ranks)
    rows = [(float(r["payload_bytes"]), float(r["busbw_gb_s"])) for r in calibration(shared_data, "h200_all_reduce.csv")]
    law = INSIDE["h200"].of_ranks(8)
    assert len(rows) == 20
    for payload, rate in rows[5:]:  # from 1 MiB on: below, they hold the host's own time
        assert payload * 1.75 / law.seconds(payload, 1.75) / 1e9 == pytest.approx(rate, rel=1e-6)
    sizes = np.geomspace(1, 2**36, 300)
    seconds = [law.seconds(float(size), 1.75) for size in sizes]
    assert all(a <= b * (1 + 1e-9) for a, b in zip(seconds, seconds[1:], strict=False))
    assert seconds[0] == pytest.approx(18e-6)


def test_speeds_that_nothing_was_fitted_to(shared_data: Path) -> None:
    stated = [(float(row["measured"]), float(row["law"])) for row in calibration(shared_data, "serving_points.csv")]
    assert [point.measured for point in SERVING] == [measured for measured, _ in stated]
    laws = [serving_by_law(point) for point in SERVING]
    assert laws == pytest.approx([law for _, law in stated], rel=0.03)
    speeds = {p: p.measured / law for p, law in zip(SERVING, laws, strict=True) if p.output_tokens > 1}
    assert sorted(speeds.values())[1] > 1.0 and max(speeds.values()) < 1.14
    assert min(speeds.values()) == pytest.approx(0.70, abs=0.01)  # 70B, 240 x (128 + 2048): the one that the law misses
    first = [p.measured / law for p, law in zip(SERVING, laws, strict=True) if p.output_tokens == 1]
    assert len(first) == 4 and min(first) > 0.91 and max(first) < 1.19
    rows = calibration(shared_data, "training_points.csv")
    stated = [(float(row["mfu_percent"]), float(row["law_mfu_percent"])) for row in rows]
    assert [point.mfu_percent for point in TRAINING] == [measured for measured, _ in stated]
    laws = [training_by_law(point) for point in TRAINING]
    assert laws == pytest.approx([law for _, law in stated], rel=0.03)
    ratios = [(p.gpu, p.mfu_percent / law) for p, law in zip(TRAINING, laws, strict=True)]
    a100, h100 = [r for gpu, r in ratios if gpu == "a100-80"], [r for gpu, r in ratios if gpu == "h100"]
    assert 0.85 < min(a100) and max(a100) < 1.13
    assert 0.59 < min(h100) and max(h100) < 0.85  # the law has neither FSDP's messages nor its host


@given(st.sampled_from(sorted(SHAPES)), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4096))
def test_tensor_ranks_share_a_layers_operations(model: str, tp: int, tokens: int) -> None:
    shape = {**SHAPES[model], "num_hidden_layers": 1}
    sizes, pairs = LayerSizes.of(shape, tp), causal_pairs(0, tokens)
    flops = tp * (sizes.product_flops(float(tokens)) + 4 * sizes.queries * pairs)
    assert flops == pytest.approx(forward_flops(shape, tokens, pairs, 0, scalar=True))


@given(st.integers(1, 65536), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["flops", "bytes_per_s"]), st.floats(1, 4))
def test_a_faster_gpu_is_never_slower(tokens: int, tp: int, peak: str, factor: float) -> None:
    gpu, sizes = GPUS["h100"], LayerSizes.of(SHAPES["7B"], tp)
    changes = {peak: getattr(gpu, peak) * factor}
    slow, fast = LayerLaw(gpu), LayerLaw(replace(gpu, **changes))
    for law in ("products_s", "elementwise_s", "cached_attention_s"):
        assert getattr(fast, law)(sizes, float(tokens)) <= getattr(slow, law)(sizes, float(tokens)) * (1 + 1e-12)
    assert slow.products_s(sizes, float(tokens)) <= slow.products_s(sizes, tokens + 1.0)


@given(st.floats(1, 2**38), st.floats(1, 4), st.sampled_from([(2, 2, 8), (16, 2, 8), (16, 16, 1), (128, 16, 1), (8, 1, 1)]))
def test_more_bandwidth_is_never_slower_nor_more_bytes_faster(payload: float, factor: float, sizes: tuple[int, int, int]) -> None:
    group, faster = Group(*sizes), replace(NETWORK, bytes_per_s=NETWORK.bytes_per_s * factor)
    for seconds in (all_reduce_s, scatter_s):
        base = seconds(cluster_of(), group, payload)
        assert seconds(cluster_of(between=faster), group, payload) <= base
        assert base <= seconds(cluster_of(), group, payload * factor) * (1 + 1e-9)
    slow = send_s(cluster_of(), payload, between=True, sharing=8)
    assert send_s(cluster_of(between=faster), payload, between=True, sharing=8) <= slow


def test_groups_over_nodes_share_the_nics_rings_need_large_payloads_and_moves_add_up() -> None:
    """Eight groups of one GPU a node have a NIC each; one group of all GPUs has all of them, up to its links."""
    cluster, payload = cluster_of(), 16384 * 2.0**20
    beside = all_reduce_s(cluster, Group(16, 16, sharing=8), payload)
    assert beside == pytest.approx(2 * 15 / 16 * payload / (0.94 * 50e9 * 0.96), rel=1e-3)
    assert all_reduce_s(cluster, Group(16, 16, sharing=1), payload) == beside  # a flow of one GPU has one NIC at most
    one_nic = cluster_of(between=replace(NETWORK, nics=1))
    assert all_reduce_s(one_nic, Group(16, 16, sharing=8), payload) == pytest.approx(8 * beside, rel=1e-3)
    assert 0.12 * beside < all_reduce_s(cluster, Group(128, 16), payload) < 0.16 * beside  # near the links' 339 GB/s
    assert all_reduce_s(cluster, Group(1), payload) == 0.0
    assert Group.of(cluster, [0, 8, 16], sharing=8) == Group(3, 3, 8)
    mib = 2.0**20
    stated = {(2, 16): 0.32, (16, 16): 0.05, (128, 16): 0.009, (16, 1024): 0.76, (128, 16384): 0.92}
    assert {key: ring_efficiency(key[0], key[1] * mib) for key in stated} == pytest.approx(stated)
    assert ring_efficiency(2, 4 * mib) == pytest.approx(0.32 / 4)  # as long as with 16 MiB
    assert ring_efficiency(4, 64 * mib) > ring_efficiency(8, 64 * mib) > ring_efficiency(8, 16 * mib)
    moves = Moves(cluster_of(nodes=3))

    def seconds_with(source: int, target: int, num_bytes: float) -> float:
        moves.add(np.array([source]), np.array([target]), num_bytes)
        return moves.seconds()

    assert seconds_with(0, 0, 1e12) == 0.0
    within = seconds_with(0, 1, 10e9)
    assert within == pytest.approx(10e9 / 357.5e9, rel=1e-2)
    assert seconds_with(2, 3, 10e9) == within  # other ranks of the node
    one = seconds_with(0, 8, 40e9)
    assert one == pytest.approx(40e9 / (0.94 * 400e9), rel=0.2) and one > within
    assert seconds_with(1, 16, 40e9) == pytest.approx(2 * one, rel=0.2)  # out of the same node
    assert seconds_with(17, 9, 40e9) == pytest.approx(2 * one, rel=0.2)  # another node sends, and a third has room


def test_constants_are_found_again() -> None:
    gpu = GPUS["h100"]
    law = LayerLaw(replace(gpu, efficiencies=replace(gpu.efficiencies, compute=0.6, memory=0.7, elementwise=0.4)))
    points = points_of("h100", FITTED["h100"])
    products, elementwise = products_of(law, points), elementwise_of(law, points)
    made = [replace(point, products_us=a, elementwise_us=b) for point, a, b in zip(points, products, elementwise, strict=True)]
    fit = fit_layers(gpu, made)
    assert fit.products_error < 0.01 and fit.elementwise_error < 1e-6
    assert fit.efficiencies.compute == pytest.approx(0.6, rel=0.05) and fit.efficiencies.elementwise == pytest.approx(0.4)
    for name in FITTED:
        measured = points_of(name, FITTED[name])
        again, ours = fit_layers(GPUS[name], measured), errors_of(LayerLaw(GPUS[name]), measured)
        assert again.products_error <= ours[0] and again.elementwise_error <= ours[1] * 1.05
        assert again.efficiencies.compute == pytest.approx(GPUS[name].efficiencies.compute, rel=0.06)
    for line in fit_lines([point for point in read_collectives(COLLECTIVES) if point.gpu == "h100"]):
        rate = line_of("h100", line.operation, line.ranks).bytes_per_s
        assert line.line.bytes_per_s == pytest.approx(rate, rel=0.08)
        assert line.error < 0.15  # those between nodes are no part of it


@pytest.mark.parametrize(("share", "peak"), [(1e-6, 1e9), (1e-6, 1e6), (2.0, 1e18)])
def test_the_sharpest_maximum_stays_in_the_range_of_floats(share: float, peak: float) -> None:
    by = replace(GPUS["h100"].efficiencies, compute=share, memory=share, power=MOST_POWER)
    law = LayerLaw(replace(GPUS["h100"], flops=peak, bytes_per_s=peak, efficiencies=by))
    sizes, tokens = LayerSizes.of(SHAPES["70B"], 1), 2**20
    larger = max(float(sizes.product_flops(tokens)), float(sizes.product_bytes(tokens))) / (share * peak)
    assert larger <= law.products_s(sizes, tokens) - by.fixed_s <= 1.05 * larger
    sharp = LayerLaw(replace(GPUS["h100"], efficiencies=replace(GPUS["h100"].efficiencies, power=MOST_POWER)))
    points = points_of("h100", FITTED["h100"])
    points = [replace(each, products_us=us) for each, us in zip(points, products_of(sharp, points), strict=True)]
    assert 10 < fit_layers(GPUS["h100"], points).efficiencies.power <= MOST_POWER


def test_the_command_fits_and_the_cluster_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "measured.json"
    arguments = ["--layers", str(LAYERS), "--collectives", str(COLLECTIVES), "--gpu", "h100", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "Qwen-72B: products" in capsys.readouterr().out
    (tmp_path / "cluster.yaml").write_text("gpu: h100\nmeasured: measured.json\n")
    cluster, tree = read_cluster(tmp_path / "cluster.yaml"), json.loads(target.read_text())
    assert cluster.gpu.efficiencies.compute == tree["efficiencies"]["compute"]
    assert dict(cluster.sources())["inside"].kind == "measured"
    assert sorted(cluster.inside.collective) == [2, 4, 8]
    assert main(["--layers", str(LAYERS), "--gpu", "h200", "--out", "x"]) == 2
    assert "has rows of a100-80, h100 only; name one of these with --gpu" in capsys.readouterr().err
    assert main(["--out", "x"]) == 2
    assert "give CONFIG.yaml to measure this machine, or" in capsys.readouterr().err


ROW = "h100,m,4096,11008,32,32,1,64,10,5,2"
HEAD = LAYERS.read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.parametrize(("text", "words"), [
    (f"{HEAD}\n{ROW}\n{ROW.replace(',64,', ',0,')}\n", "line 3: tokens is '0', but must be a positive number"),
    (f"{HEAD}\n{ROW.replace(',10,', ',fast,')}\n", "products_us is 'fast'"),
    (f"{HEAD}\n{ROW.replace(',64,', ',6.5,')}\n", "tokens is 6.5, but must be a whole number"),
    (f"{HEAD.replace('tokens', 'n')}\n{ROW}\n", "no column tokens"), (f"{HEAD}\n", "holds no row"),
    (f"{HEAD}\n{ROW}\n", "1 measured layers are too few"),
])  # fmt: skip
def test_broken_measurements_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "layers.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        fit_layers(GPUS["h100"], read_layers(path))
