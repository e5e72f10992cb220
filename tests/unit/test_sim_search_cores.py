"""Plans on processor cores: ranks share the cores out, and the measured order of placements follows from the prices."""

from __future__ import annotations

from pathlib import Path

import pytest

from oppo_megatron.cli.lengths import even_lengths, forced_limits
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.sim.clusters.cluster import threaded
from oppo_megatron.sim.clusters.reading import read_cluster
from oppo_megatron.sim.search.planning import Task
from oppo_megatron.sim.search.playing import play_config

ROOT = Path(__file__).resolve().parents[2]
MEASURED = {
    "disaggregated": 4.18, "single": 4.66, "disaggregated, reference: actor": 4.91, "colocated, actor: {dp: 2}": 5.56,
    "colocated, actor: {tp: 2}": 8.89,
}  # fmt: skip
"""Seconds a step of examples/benchmark/overlap.yaml on two cores of a Xeon (docs/measurements.md)."""
PARTED = 1.15
CLUSTERS = {
    "named": "gpus_per_node: 2\ngpu: cpu\n",
    "by its peaks": "gpus_per_node: 2\ngpu: {memory_gb: 12, tflops: 0.201, gb_per_s: 28, like: cpu}\n"
    "inside: {alpha_us: 300, gb_per_s: 1}\n",
}


@pytest.mark.parametrize("kind", CLUSTERS)
def test_measured_placements_are_in_their_order(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two measured placements that differ by more than 15 %, the faster one is played as the faster one."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "cluster.yaml").write_text(CLUSTERS[kind])
    cluster = read_cluster(tmp_path / "cluster.yaml")
    found = {}
    for mode in MEASURED:
        cores = ["runtime.device=cpu", "runtime.dtype=float32"]
        config = load_config(TrainConfig, "examples/benchmark/overlap.yaml", [f"placement={{mode: {mode}}}", *cores])
        found[mode] = play_config(Task(config, cluster, even_lengths(config), limits=forced_limits(config)), config).total
    for one, other in [(a, b) for a in MEASURED for b in MEASURED if MEASURED[b] > PARTED * MEASURED[a]]:
        assert found[one] < found[other], (one, other)


def test_ranks_share_the_cores_of_a_node(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("gpus_per_node: 8\ngpu: cpu\n")
    cores = read_cluster(tmp_path / "cluster.yaml")
    assert threaded(cores, 8, 0) == cores
    two = threaded(cores, 4, 0)
    assert two.gpu.flops == pytest.approx(1.9 * cores.gpu.flops)
    assert two.gpu.memory_bytes == 2 * cores.gpu.memory_bytes and "threads" in two.gpu.sources
    assert threaded(cores, 4, 1).gpu.flops == cores.gpu.flops
    (tmp_path / "cluster.yaml").write_text("gpu: h100\n")
    gpus = read_cluster(tmp_path / "cluster.yaml")
    assert threaded(gpus, 1, 0) == gpus
