"""`benchmarks.machine`: the files that the planner reads, measured or fitted."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.fitting.points import CollectivePoint, LayerPoint, read_collectives, read_layers, write_collectives, write_layers
from benchmarks.machine import Core, cluster_tree, main, processor
from oppo_megatron.cli.main import main as oppo
from oppo_megatron.cores import usable_cores
from oppo_megatron.rundir.directory import write_json
from oppo_megatron.sim.clusters.cluster import threaded
from oppo_megatron.sim.clusters.reading import read_cluster

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
CORE = Core(5e10, 2e10, {1: 1.0, 2: 1.5, 4: 2.0})
EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "benchmark" / "overlap.yaml")


def test_points_are_read_as_they_were_written(tmp_path: Path) -> None:
    layers = [LayerPoint("cpu", "qwen2", {"model_type": "llama"} | SIZES, 1, 4, 2.5, 1.25, 0.5)]
    messages = [CollectivePoint("cpu", "send_recv", 2, 2, 1024.0, 51.5)]
    write_layers(tmp_path / "layers.csv", layers)
    write_collectives(tmp_path / "collectives.csv", messages)
    assert read_layers(tmp_path / "layers.csv") == layers
    assert read_collectives(tmp_path / "collectives.csv") == messages


def test_a_rank_is_as_fast_as_its_cores_were_measured(tmp_path: Path) -> None:
    threads = {str(count): times for count, times in CORE.threads.items()}
    write_json(tmp_path / "measured.json", {"source": "here", "threads": threads})
    text = yaml.safe_dump(cluster_tree(processor(CORE, 4), 4, "measured.json"))
    (tmp_path / "cluster.yaml").write_text(text, encoding="utf-8")
    cluster = read_cluster(tmp_path / "cluster.yaml")
    assert cluster.num_ranks == 4 and cluster.gpu.on_cpu
    for threads, times in {1: 1.0, 2: 1.5, 3: 1.5, 4: 2.0}.items():
        gpu = threaded(cluster, 1, threads).gpu
        assert (gpu.flops, gpu.bytes_per_s) == pytest.approx((times * 5e10, times * 2e10))
        assert threads == 1 or gpu.sources["threads"].kind == "measured"
    assert threaded(cluster, 2, 0).gpu.flops == pytest.approx(1.5 * 5e10)


@pytest.mark.long
def test_the_machine_at_hand_is_a_cluster_that_runs_can_be_simulated_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(EXAMPLE).parents[2])
    assert main([EXAMPLE, "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert f"{usable_cores()} cores: " in told and "qwen2: products" in told
    cluster = read_cluster(tmp_path / "cluster.yaml")
    assert cluster.adapted is not None and cluster.engine.source.kind == "measured"
    assert cluster.gpus_per_node == usable_cores() and cluster.gpu.sources["efficiencies"].kind == "measured"
    command = ["simulate", EXAMPLE, "--cluster", str(tmp_path / "cluster.yaml"), "--steps", "2"]
    assert oppo([*command, "placement.mode=single"]) == 0
    assert "s/step" in capsys.readouterr().out
