"""launch/local/torchrun.sh: which launcher it starts, and with what."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "local" / "torchrun.sh"
RUN = ["2", "train", "c.yaml", "--resume"]
ONE_NODE = "--standalone --nproc-per-node 2 --no-python oppo train c.yaml --resume"


def started(folder: Path, launchers: list[str], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script with launchers that print what they are and get."""
    for name in launchers:
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*"\n')
        (folder / name).chmod(0o755)
    path = f"{folder}:/usr/bin:/bin"
    return subprocess.run(
        ["/bin/bash", str(SCRIPT), *arguments], env={"PATH": path, **environment}, text=True, capture_output=True, check=False
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
