"""`oppo bench gpu` by its command, on a CUDA device that is fake: every process that it starts has one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.rehearsal.cuda_stub import FAULT, compiler, write_python
from tests.support.processes import python_path

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.skipif(compiler() is None, reason="needs g++, for torch's hooks of a CUDA device (Debian: g++)")
def test_the_command_measures_all_parts_unattended(tmp_path: Path) -> None:
    """Its processes, orders and logs are those of a machine with a GPU; kernels take no time there, and copies none."""
    out = tmp_path / "out"
    environment = os.environ | {"PYTHONPATH": python_path(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [
        write_python(tmp_path / "python"),
        "-m",
        "tests.rehearsal.small_gpu_bench",
        "--out",
        out,
        "--seconds",
        "600",
    ]
    done = subprocess.run(
        [*command, "--batch", "4", "--limit", "64"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((out / "gpu.json").read_text())["results"]
    why_not = {row["part"]: row["why_not"] for row in results if "why_not" in row}
    assert not why_not or ("make bench-trl" in why_not["ppo"] and len(why_not) == 1), why_not
    variants = [(row["part"], row.get("variant")) for row in results]
    for part, variant in (
        ("decode", "as trained"),
        ("decode", "transformers generate"),
        ("ppo", "sequential"),
        ("ppo", "full"),
    ):
        assert (part, variant) in variants and f"{variant}" in done.stdout
    assert f"figures: {out / 'gpu.json'}" in done.stdout
    logs = [log.read_text() for log in out.glob("tiny/*.log")]
    assert len(logs) == 5 and not any(FAULT in log for log in [*logs, done.stderr])
