"""Who is killed, how and when: nothing of the run is left alive, and `--resume` goes on."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import psutil
import pytest

from oppo_megatron.cluster.rank_processes import rank_processes
from oppo_megatron.errors import EXIT_REQUEUE
from tests.e2e.started import fault, num_lines, start, wait_until
from tests.e2e.test_preemption import whole_checkpoints
from tests.support.layouts import deep
from tests.support.ppo import Workspace
from tests.support.processes import marked, wait_for

pytestmark = pytest.mark.long
LEFT_S = 20
"""A busy machine is slow to end what was killed."""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A mark in the environment of all processes that the test starts, and of what they start."""
    monkeypatch.setenv("OPPO_TEST_KILLS", str(tmp_path))
    return f"OPPO_TEST_KILLS={tmp_path}"


def settings(workspace: Workspace, name: str, **changes: Any) -> dict[str, Any]:
    own = {"steps": 3, "placement": {"mode": "disaggregated"}, "checkpoint": {"every_steps": 1}}
    return deep(workspace, name.replace(" ", "-"), **(own | changes))


def process_of(run: subprocess.Popen[str], victim: str) -> int:
    """Its process id as soon as both ranks exist; before them the fork server forks one process that ends at once."""
    if victim == "launcher":
        return run.pid
    ranks: list[psutil.Process] = []

    def both() -> bool:
        ranks[:] = rank_processes(psutil.Process(run.pid))
        return len(ranks) == 2

    wait_until(run, both)
    return ranks[-1].ppid() if victim == "fork server" else ranks[-1].pid


def assert_goes_on(config: dict[str, Any], mark: str, *overrides: str) -> None:
    run = start(config, "--resume", *overrides)
    _, told = run.communicate(timeout=400)
    assert run.returncode == 0, told
    wait_for(lambda: not marked(mark), LEFT_S)
    assert not (Path(config["run_dir"]) / "holder.json").exists()


@pytest.mark.parametrize("moment", ["import", "meeting", "update", "checkpoint"])
@pytest.mark.parametrize("victim", ["launcher", "fork server", "rank"])
def test_nothing_outlives_one_that_is_killed(workspace: Workspace, mark: str, victim: str, moment: str) -> None:
    """One of the ranks stands still at that moment; at `import` they have just been forked."""
    config = settings(workspace, f"{victim}-{moment}")
    if moment != "import":
        fault(config, moment, 1, "hangs")
    run = start(config, module="tests.e2e.started")
    if moment != "import":
        wait_until(run, lambda: not (Path(config["run_dir"]) / "fault").exists())
    os.kill(process_of(run, victim), signal.SIGKILL)
    _, told = run.communicate(timeout=60)
    assert run.returncode == (-signal.SIGKILL if victim == "launcher" else 2), told
    wait_for(lambda: not marked(mark), LEFT_S)
    assert_goes_on(config, mark)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_before_there_is_anything_to_save(workspace: Workspace, mark: str, number: signal.Signals) -> None:
    config = settings(workspace, f"early-{number.name}")
    run = start(config)
    wait_until(run, lambda: len(marked(mark)) > 2)
    run.send_signal(number)
    _, told = run.communicate(timeout=60)
    assert run.returncode != 0, told
    wait_for(lambda: not marked(mark), LEFT_S)


@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_a_hang_up_saves_and_the_fork_server_hears_no_signal(workspace: Workspace, mark: str, victim: str) -> None:
    config = settings(workspace, f"hang-up-{victim}", steps=99)
    run = start(config)
    wait_until(run, lambda: num_lines(config) >= 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(process_of(run, "fork server"), number)
    done = num_lines(config)
    wait_until(run, lambda: num_lines(config) > done)
    os.kill(process_of(run, victim), signal.SIGHUP)
    _, told = run.communicate(timeout=120)
    assert run.returncode == EXIT_REQUEUE and "saved; continue with" in told, told
    wait_for(lambda: not marked(mark), LEFT_S)
    assert_goes_on(config, mark, f"steps={num_lines(config) + 1}")


@pytest.mark.parametrize("how", ["terminal closed", "shell killed", "nohup"])
def test_a_terminal_that_is_closed_saves_the_run_in_it(workspace: Workspace, mark: str, how: str) -> None:
    config = settings(workspace, how, steps=3 if how == "nohup" else 99, **{"logging.console": "plain"})
    path = Path(config["run_dir"]).with_suffix(".yaml")
    start(config, "--dry-run").communicate(timeout=120)  # writes the file
    ours, theirs = os.openpty()
    command = f"{sys.executable} -m oppo_megatron train {path}"
    command = f"nohup {command} > /dev/null 2>&1" if how == "nohup" else command
    shell = subprocess.Popen(
        ["bash", "-c", f"{command}; true"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        cwd=Path.cwd(), preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    wait_for(lambda: num_lines(config) >= 1, 300)
    if how == "shell killed":
        shell.kill()
    else:
        os.close(ours)
    shell.wait(60)
    wait_for(lambda: not marked(mark), 300 if how == "nohup" else 60)
    if how == "nohup":
        assert num_lines(config) == 3
    else:
        assert "clock" in whole_checkpoints(config)[-1], "saved within a step"
        assert_goes_on(config, mark, f"steps={num_lines(config) + 1}")


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
