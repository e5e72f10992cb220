"""`placement.mode: auto` with real measuring runs: measured, chosen, trained; not measured twice; failures told."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from oppo_megatron.cli.main import main
from oppo_megatron.config.load import load_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.cores import usable_cores
from tests.support.ppo import Workspace

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _two_cores() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])
    yield
    os.sched_setaffinity(0, cores)


NAMES = ["single", "disaggregated 1 | 1", "disaggregated 1 | 1 (reference: actor)", "colocated dp 2", "colocated tp 2"]


def write(workspace: Workspace, name: str, **changes: Any) -> tuple[Path, Path]:
    common = {"placement": {"mode": "auto"}, "runtime": {"device": "cpu"}, "logging": {"console": "plain"}}
    config = workspace.config(name, **common, **changes)
    path = workspace.root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path, Path(config["run_dir"])


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.long
def test_measures_chooses_and_trains(workspace: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    path, run = write(workspace, "train")
    assert main(["train", str(path)]) == 0
    record, told = read(run / "placement.json"), capfd.readouterr().err
    assert f"placement: measuring {', '.join(NAMES)} on" in told
    assert f"placement: {record['reason']} ({run / 'placement.json'})" in told
    assert ("this machine is busy" in told) == (record["load_average_1min"] > usable_cores())
    rows = {row["name"]: row for row in record["candidates"]}
    assert list(rows) == NAMES and all(row["failure"] is None for row in rows.values())
    assert record["chosen"]["name"] == min(rows, key=lambda name: rows[name]["seconds_per_token"])
    assert {run["tokens"] for row in rows.values() for run in row["runs"]} == {rows["single"]["runs"][0]["tokens"]}

    # The run itself: the chosen placement is written down, and it trained to its end.
    config = load_config(TrainConfig, run / "config.yaml")
    assert config.placement.mode == record["chosen"]["placement"]["mode"]
    assert len(read(run / "hosts.json")["ranks"]) == rows[record["chosen"]["name"]]["ranks"]
    assert read(run / "summary.json")["steps"] == 3 and (run / "weights" / "actor" / "model.safetensors").exists()

    # The measuring runs: short, and nothing big is left.
    scratch = sorted(path for path in (run / "placement").iterdir() if path.is_dir())
    assert {path.name for path in scratch} >= {"single-1", "disaggregated-1-1-1", "disaggregated-1-1-reference-actor-1"}
    for each in scratch:
        assert len((each / "metrics.jsonl").read_text().splitlines()) == 3
        assert not (each / "weights").exists() and not (each / "trace.json").exists()

    # The same again is not measured again.
    (run / "summary.json").unlink()
    assert main(["train", str(path), "--dry-run", "steps=9"]) == 0
    captured = capfd.readouterr()
    assert "as measured before" in captured.err and f"mode: {config.placement.mode}" in captured.out


@pytest.mark.long
def test_one_that_fails_is_left_out(workspace: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    rewards = [{"kind": "python", "entry_point": "tests.e2e.rewards:only_alone"}]
    path, run = write(workspace, "one-fails", reward=None, rewards=rewards)
    assert main(["plan", "measure", str(path)]) == 0
    out = capfd.readouterr().out
    failed = next(line for line in out.splitlines() if line.startswith("failed: disaggregated 1 | 1: "))
    assert "cannot be shared" in failed and str(run / "placement" / "disaggregated-1-1-1.log") in failed
    assert "single trains" in out and "of 5 placements it is the only one that ran." in out
    assert "placement: {mode: single}\n" in out
    assert read(run / "placement.json")["chosen"]["name"] == "single" and not (run / "metrics.jsonl").exists()


@pytest.mark.long
def test_if_all_fail_the_error_is_told(workspace: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    rewards = [{"kind": "python", "entry_point": "tests.e2e.rewards:failing"}]
    path, run = write(workspace, "all-fail", reward=None, rewards=rewards)
    assert main(["train", str(path)]) == 2
    err = capfd.readouterr().err
    assert "none of 5 placements could be measured; the first, single, ended with:" in err
    assert "no opinion" in err and "Traceback" not in err
    assert not (run / "placement.json").exists() and not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize("command", [["train"], ["plan", "measure"]])
def test_what_each_run_would_refuse_is_told(workspace: Workspace, capfd: pytest.CaptureFixture[str], command: list[str]) -> None:
    bad = workspace.root / "bad.jsonl"
    bad.write_text('{"prompt": "1+1=", "answer": "2"}\nno JSON\n')
    path, run = write(workspace, f"bad-{command[0]}", **{"data.path": str(bad)})
    assert main([*command, str(path)]) == 2
    err = capfd.readouterr().err
    assert f"{bad}:2: not JSON" in err and "could be measured" not in err and "Traceback" not in err
    assert not (run / "placement").exists()
