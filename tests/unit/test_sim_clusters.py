"""`cluster.yaml`: names, numbers, measured files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.errors import ConfigError
from oppo_megatron.sim.clusters.cluster import GPUS, H100_LAWS, INSIDE, Cluster, Efficiencies, Line, threaded
from oppo_megatron.sim.clusters.reading import read_cluster

TWO = "nodes: 2\ngpu: h100\nbetween: {gb_per_s: 50, nics: 8}\n"
NUMBERS = "gpu: {memory_gb: 96, tflops: 500, gb_per_s: 2000}\ninside: {alpha_us: 16, gb_per_s: 200}\n"


def cluster_of(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return read_cluster(path)


def test_names_give_published_constants(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, TWO)
    assert (cluster.num_ranks, cluster.node_of(7), cluster.node_of(8)) == (16, 0, 1)
    assert cluster.gpu is GPUS["h100"] and cluster.inside is INSIDE["h100"]
    assert cluster.between is not None and cluster.between.node_bytes_per_s == 400e9


def test_numbers_stand_for_a_gpu(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, NUMBERS + "gpus_per_node: 4\n")
    assert (cluster.gpu.flops, cluster.gpu.bytes_per_s, cluster.gpu.memory_bytes) == (500e12, 2000e9, 96e9)
    assert cluster.gpu.efficiencies == H100_LAWS and cluster.inside.of_ranks(2) == Line(16e-6, 200e9)
    assert cluster.between is None


def test_every_constant_has_a_source(tmp_path: Path) -> None:
    texts = [TWO, NUMBERS, *(f"gpu: {name}\n" for name in GPUS)]
    for text in texts:
        sources = dict(cluster_of(tmp_path, text).sources())
        constants = {"gpu.flops", "gpu.bytes_per_s", "gpu.memory_bytes", "gpu.efficiencies", "inside"}
        assert constants <= sources.keys() and all(source.where for source in sources.values())
    assert sources["gpu.efficiencies"].kind == "assumed"  # the last one is a CPU
    given = dict(cluster_of(tmp_path, NUMBERS).sources())
    assert str(given["gpu.flops"]) == "given: `gpu.tflops` of cluster.yaml" and given["inside"].kind == "given"
    assert dict(cluster_of(tmp_path, "gpu: h200\n").sources())["gpu.efficiencies"].kind == "assumed"


SEND = {"alpha_s": 1e-5, "bytes_per_s": 1e11}
LAWS = {
    "compute": 0.6, "memory": 0.7, "fixed_s": 1e-5, "power": 2.0, "elementwise": 0.5, "elementwise_fixed_s": 0.0, "plain": 0.8,
}  # fmt: skip


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu: h10\n", ["`gpu`", "'h10'", "h100"]),
        ("gpu: {memory_gb: 80, tflops: 989, gb_per_s: 0}\n", ["`gpu.gb_per_s`", "0", "greater than or equal to 0.001"]),
        ("gpu: h100\nnodes: 2\nbetween: {gb_per_s: 0}\n", ["`between.gb_per_s`", "greater than or equal to 0.001"]),
        ("gpu: h100\nnodes: 2\nbetween: {gb_per_s: 50, nics: 0}\n", ["`between.nics`", "greater than 0"]),
        ("gpu: h100\nnodes: 0\n", ["`nodes`", "0", "greater than or equal to 1"]),
        ("gpu: h100\nnodes: 2\n", ["nodes is 2", "add `between"]),
        ("gpu: {memory_gb: 80, tflops: 989, gb_per_s: 3000}\n", ["gpus_per_node is 8", "add `inside"]),
        ("nodes: 1\n", ["`gpu` is missing"]),
        ("gpu: h100\nmeasured: no.json\n", ["no.json", "does not exist"]),
        ("gpu: h100\ngpus: 8\n", ["`gpus` is not a setting", "gpu"]),
        ("gpu: {memory_gb: -1, tflops: 989, gb_per_s: 3000}\ngpus_per_node: 1\n", ["`gpu.memory_gb`", "-1"]),
        ("gpu: h100\ninside: {gb_per_s: .inf}\n", ["`inside.gb_per_s`", "finite"]),
        ("gpu: h100\nnodes: 60000\nbetween: {gb_per_s: 50}\n", ["480000 ranks", "at most 65536"]),
        ("gpu: h100\nmeasured: .\n", ["is a folder, but must be a file"]),
    ],
)
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


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("efficiencies.compute", [0, -1, 1e-300, 3, True, "x"]),
        ("efficiencies.power", [0, 17, 1e300]),
        ("send.bytes_per_s", [0, 1e-300, 1e300, "x"]),
        ("send.alpha_s", [-1, 1e300, True]),
        ("engine.decode", [-1, 1e300, float("nan"), True]),
        ("threads.2", [0, 1e-300, 1e300, True]),
        ("threads.0", [1.0]),
        ("collective.1", [SEND]),
        ("collective", [[], 3]),
    ],
)
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
