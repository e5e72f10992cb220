"""Steps of many ranks in virtual time: layouts that fit, what is lost, and the script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.scale_study import MARGIN, STRONG, WEAK, Layout, Point, cluster_of, least_layout, main
from oppo_megatron.layout.placements import role_placements, world_size


@pytest.mark.parametrize(("model", "ranks"), [("8B", 8), ("8B", 128), ("70B", 64), ("405B", 256)])
def test_the_least_layout_fits_and_uses_every_rank(model: str, ranks: int) -> None:
    found = least_layout(model, ranks, WEAK * ranks)
    assert found is not None
    layout, fullest_gb = found
    config = layout.config(model, ranks, WEAK * ranks, 0)
    assert world_size(config) == ranks and fullest_gb <= (1 - MARGIN) * cluster_of(ranks).gpu.memory_bytes / 1e9
    placements = role_placements(config)
    assert len(placements["actor"].ranks) == 3 * ranks // 4
    assert set(placements["reference"].ranks) == set(placements["critic"].ranks) == set(placements["reward"].ranks)


def test_no_layout_where_nothing_fits() -> None:
    assert least_layout("405B", 64, 256) is None
    assert least_layout("8B", 16384, STRONG) is None
    assert least_layout("8B", 8192, STRONG) is not None


def test_a_free_network_saves_and_a_free_host_decodes_faster() -> None:
    point = Point("8B", 32, 128, Layout((1, 1), (1, 1)), 0)
    assert 0 < point.network_s() < point.costs.update_s("actor", sum(point.typical))
    assert Point("8B", 8, 32, Layout((1, 1), (2, 1)), 0).network_s() == 0  # one node
    assert point.fixed_s(100) == 100 * point.costs.actions.decode_at(0).fixed_s


def test_the_script_prints_and_writes_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models", "8B", "--ranks", "8,32", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "scale.json").read_text())
    assert [row["ranks"] for row in found["weak"]] == [8, 32] and all(row["speedup"] > 1 for row in found["weak"])
    assert [round(row["step_s"], 2) for row in found["weak"]] == [18.76, 20.95], "benchmarks/README.md"
    for row in found["weak"]:
        shares = sum(row[f"{part}_percent"] for part in ("decode", "score", "update", "critic"))
        assert shares + 100 * row["idle_s"] / row["step_s"] == pytest.approx(100)
    assert "stops first" in said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--ranks", "12"], "--ranks 12: nodes have 8 GPUs; give multiples of 8"),
        (["--models", "9B"], "--models names 9B; choose from 8B, 70B, 405B"),
        (["--models", "405B", "--ranks", "8"], "no layout fits an H200's memory; give more ranks"),
    ],
)
def test_mistakes(arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err
