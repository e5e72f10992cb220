"""Five constants of an engine from the steps that an engine of known constants would take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fitting.engine import PARAMETERS, Observed, fit_engine, phase_seconds
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import DataError
from oppo_megatron.rundir.directory import write_json
from oppo_megatron.sim.clusters.cluster import OF_CPU, Cluster, Engine, measured
from oppo_megatron.sim.clusters.reading import read_cluster
from oppo_megatron.sim.pricing.model import Decoding

ROOT = Path(__file__).resolve().parents[2]
HERE = measured("here")
TRUE = Engine(2e-3, 1e-3, HERE, decode=1.2, read=1.1, update=1.4)
LENGTHS = ((3, 40, 90, 200), (10, 20, 30, 250), (64, 64, 64, 64))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    write_json(tmp_path / "measured.json", {"source": "here", "threads": {"1": 1.0, "2": 1.7}})
    (tmp_path / "cluster.yaml").write_text("gpus_per_node: 2\ngpu: cpu\nmeasured: measured.json\n")
    return read_cluster(tmp_path / "cluster.yaml")


def observed(cluster: Cluster, engine: Engine, cores: int) -> list[Observed]:
    given = ["placement={mode: single}", "rollout.batch_size=4", "runtime.dtype=float32"]
    config = load_config(TrainConfig, "examples/benchmark/overlap.yaml", given)
    config = config.model_copy(update={"runtime": config.runtime.with_threads(cores)})
    adapted = replace(cluster, adapted=engine)
    steps = [Decoding(64, lengths) for lengths in LENGTHS]
    return [Observed(config, step, phase_seconds(adapted, config, step)) for step in steps]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_constants_are_found_again(cluster: Cluster) -> None:
    fit = fit_engine(cluster, [*observed(cluster, TRUE, 1), *observed(cluster, TRUE, 2)], HERE)
    for name in PARAMETERS:
        assert getattr(fit.engine, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert max(fit.errors.values()) < 1e-9 and list(fit.errors) == ["decode", "score", "update", "critic update"]


def test_further_cores_do_not_shorten_what_the_host_takes(cluster: Cluster) -> None:
    kernels, both = (observed(cluster, engine, 1)[0].seconds for engine in (replace(TRUE, launch_s=0, replay_s=0), TRUE))
    faster = observed(cluster, TRUE, 2)[0].seconds
    for phase, seconds in kernels.items():
        assert faster[phase] == pytest.approx(both[phase] - seconds * (1 - 1 / 1.7), rel=0.02), phase


def test_what_was_measured_is_read(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.engine == OF_CPU
    write_json(tmp_path / "measured.json", {"source": "here", "engine": {name: getattr(TRUE, name) for name in PARAMETERS}})
    assert read_cluster(tmp_path / "cluster.yaml").engine == replace(TRUE, source=measured("here"))


def test_without_a_step_there_is_nothing_to_fit(cluster: Cluster) -> None:
    with pytest.raises(DataError, match="no step was measured; let the runs make two or more"):
        fit_engine(cluster, [], HERE)
