"""`oppo train` under signals: SIGTERM saves and asks to be started again, a killed rank is replaced; the run is the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from oppo_megatron.errors import EXIT_REQUEUE
from tests.support.layouts import deep
from tests.support.ppo import Workspace, read_outcome, run_ppo_ranks, weight_distance

STEPS = 16


def start(config: dict[str, Any], *options: str) -> subprocess.Popen[str]:
    path = Path(config["run_dir"]).parent / "preempted.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "oppo_megatron", "train", str(path), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for_lines(run: subprocess.Popen[str], config: dict[str, Any], count: int) -> None:
    """Until the run has written so many lines of metrics."""
    path, until = Path(config["run_dir"]) / "metrics.jsonl", time.monotonic() + 100
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < until, "the run does not come on"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_and_a_run_whose_rank_is_killed_end_as_if_nothing_had_been(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    workspace = Workspace.create(tmp_path_factory.mktemp("preemption"))
    changes: dict[str, Any] = {
        "steps": STEPS,
        "overlap.intra": True,
        "overlap.inter": True,
        "overlap.delta": {"rule": "fixed", "initial": 2, "max": 4},
        "checkpoint": {"every_steps": 4, "keep_best": True},
    }
    config = deep(workspace, "preempted", **changes)

    run = start(config, "--max-restarts", "1")
    wait_for_lines(run, config, 2)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == EXIT_REQUEUE, run.communicate()

    run = start(config, "--resume", "--max-restarts", "1")
    wait_for_lines(run, config, 6)
    pid = json.loads((Path(config["run_dir"]) / "hosts.json").read_text())["ranks"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    _, told = run.communicate(timeout=100)
    assert run.returncode == 0 and "was ended by SIGKILL" in told and "0 of 1 restarts left" not in told

    outcome, plain = read_outcome(Path(config["run_dir"])), run_ppo_ranks(deep(workspace, "plain", **changes))
    assert [line["step"] for line in outcome.metrics] == list(range(1, STEPS + 1))
    assert outcome.rollouts == plain.rollouts
    assert weight_distance(outcome.actor, plain.actor) == weight_distance(outcome.critic, plain.critic) == 0.0
