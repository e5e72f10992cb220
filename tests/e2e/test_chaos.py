"""`tools.chaos` in short: ranks of a real `oppo train` are killed, and what it made is the undisturbed run's to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "reliability" / "chaos.yaml"
KILLS = 5


@pytest.mark.long
def test_five_killed_ranks_leave_no_trace(tmp_path: Path) -> None:
    command = [str(CONFIG), "steps=8", "--prompt-tokens", "24", "--kills", str(KILLS), "--seed", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.chaos", *command, "--out", str(tmp_path)],
        cwd=CONFIG.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "disturbed.log").read_text()[-2000:]
    assert "final weights, rollouts and metrics equal those of the undisturbed run" in done.stdout
    result = json.loads((tmp_path / "chaos.json").read_text())
    assert len(result["kills"]) == KILLS and result["differences"] == []
    assert {kill["rank"] for kill in result["kills"]} == {0, 1}
    assert (tmp_path / "disturbed.log").read_text().count("was ended by SIGKILL") == KILLS
