"""launch/local/requeue.sh: what was told to stop is started again with --resume, so often and no oftener."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "local" / "requeue.sh"
COMMAND = """#!/usr/bin/env bash
echo "$@" >> calls
code=$(sed -n "$(wc -l < calls)p" codes)
[[ $code != wait ]] || { trap 'exit 75' TERM USR1; touch waiting; while true; do sleep 0.05; done; }
exit "$code"
"""


def begin(folder: Path, codes: list[str], **variables: str) -> subprocess.Popen[str]:
    """`oppo`, which ends with these codes, one a start."""
    (folder / "oppo").write_text(COMMAND)
    (folder / "oppo").chmod(0o755)
    (folder / "codes").write_text("\n".join(codes) + "\n")
    environment = {**os.environ, "REQUEUE_PAUSE_S": "0.1", **variables}
    command = [str(SCRIPT), "./oppo", "train", "c.yaml", "steps=3"]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("codes", "code", "starts"), [(["75", "75", "0"], 0, 3), (["0"], 0, 1), (["75", "2"], 2, 2), (["75"] * 9, 75, 4)]
)
def test_75_and_nothing_else_is_started_again_and_not_for_ever(tmp_path: Path, codes: list[str], code: int, starts: int) -> None:
    loop = begin(tmp_path, codes, MAX_REQUEUES="3")
    _, told = loop.communicate(timeout=120)
    assert loop.returncode == code, told
    assert calls(tmp_path) == ["train c.yaml steps=3"] + ["train c.yaml steps=3 --resume"] * (starts - 1)
    assert told.count("starting again") == starts - 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_loop_stops_both(tmp_path: Path, number: signal.Signals) -> None:
    loop = begin(tmp_path, ["75", "wait", "0"])
    until = time.monotonic() + 120
    while not (tmp_path / "waiting").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    loop.send_signal(number)
    assert loop.wait(120) == 75 and len(calls(tmp_path)) == 2
