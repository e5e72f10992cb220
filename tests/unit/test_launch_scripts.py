"""launch/local: requeue.sh repeats a stopped run with --resume, torchrun.sh starts a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

LOCAL = Path(__file__).resolve().parents[2] / "launch" / "local"
COMMAND = """#!/usr/bin/env bash
echo "$@" >> calls
code=$(sed -n "$(wc -l < calls)p" codes)
[[ $code != wait ]] || { trap 'exit 75' TERM USR1; touch waiting; while true; do sleep 0.05; done; }
exit "$code"
"""


def begin(folder: Path, codes: list[str], **variables: str) -> subprocess.Popen[str]:
    (folder / "oppo").write_text(COMMAND)
    (folder / "oppo").chmod(0o755)
    (folder / "codes").write_text("\n".join(codes) + "\n")
    environment = {**os.environ, "REQUEUE_PAUSE_S": "0.1", **variables}
    command = [str(LOCAL / "requeue.sh"), "./oppo", "train", "c.yaml", "steps=3"]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("codes", "code", "starts"), [(["75", "75", "0"], 0, 3), (["0"], 0, 1), (["75", "2"], 2, 2), (["75"] * 9, 75, 4)]
)
def test_75_and_nothing_else_is_started_again_and_not_for_ever(tmp_path: Path, codes: list[str], code: int, starts: int) -> None:
    loop = begin(tmp_path, codes, MAX_REQUEUES="3")
    _, said = loop.communicate(timeout=120)
    assert loop.returncode == code, said
    assert calls(tmp_path) == ["train c.yaml steps=3"] + ["train c.yaml steps=3 --resume"] * (starts - 1)
    assert said.count("starting again") == starts - 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_loop_stops_both(tmp_path: Path, number: signal.Signals) -> None:
    loop = begin(tmp_path, ["75", "wait", "0"])
    until = time.monotonic() + 120
    while not (tmp_path / "waiting").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    loop.send_signal(number)
    assert loop.wait(120) == 75 and len(calls(tmp_path)) == 2


RUN = ["2", "train", "c.yaml", "--resume"]
ONE_NODE = "--standalone --nproc-per-node 2 --no-python oppo train c.yaml --resume"


def started(folder: Path, launchers: list[str], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    for name in launchers:
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*"\n')
        (folder / name).chmod(0o755)
    path = f"{folder}:/usr/bin:/bin"
    return subprocess.run(
        ["/bin/bash", str(LOCAL / "torchrun.sh"), *arguments],
        env={"PATH": path, **environment},
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("launchers", "restarts", "expected"),
    [
        (["torchrun"], {}, f"torchrun {ONE_NODE}"),
        (["torchrun", "ft_launcher"], {}, f"torchrun {ONE_NODE}"),
        (["torchrun"], {"MAX_RESTARTS": "3"}, f"torchrun --max-restarts 3 {ONE_NODE}"),
        (
            ["torchrun", "ft_launcher"],
            {"MAX_RESTARTS": "3"},
            f"ft_launcher --ignore-missing-fault-tol-cfg --max-restarts 3 {ONE_NODE}",
        ),
    ],
)
def test_the_launcher_that_can_start_ranks_again(
    tmp_path: Path, launchers: list[str], restarts: dict[str, str], expected: str
) -> None:
    assert started(tmp_path, launchers, *RUN, **restarts).stdout == expected + "\n"


def test_several_machines(tmp_path: Path) -> None:
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    line = started(tmp_path, ["torchrun"], *RUN, **nodes).stdout
    assert "--nnodes 2 --node-rank 1 --master-addr node0 --master-port 29500 --rdzv-conf timeout=300" in line
    failed = started(tmp_path, ["torchrun"], *RUN, NNODES="2")
    assert failed.returncode and "the number of this machine, from 0" in failed.stderr


def test_help(tmp_path: Path) -> None:
    shown = started(tmp_path, [], "--help")
    assert shown.returncode == 0 and "MAX_RESTARTS=N" in shown.stdout and "All ranks together" in shown.stdout
    assert started(tmp_path, []).returncode == 1
