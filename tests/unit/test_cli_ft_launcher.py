"""`oppo train --max-restarts` by ft_launcher: what the worker tells it, what `oppo train` makes of the end, and signals."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.cli import ft_launcher, ft_worker, launch, run
from oppo_megatron.cli.ft_launcher import Desk, Verdict, launcher_command
from oppo_megatron.cli.signals import ending_by_signal
from oppo_megatron.config.load import dump_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import EXIT_REQUEUE, ConfigError, DataError
from tests.support.configs import least_config


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return least_config(tmp_path / "run")


KILLED = launch.RankKilled("rank 1 was ended by SIGKILL")


@pytest.mark.parametrize(
    ("end", "begun", "told", "code", "verdict"),
    [
        (0, 0, False, 0, Verdict(0)),
        (EXIT_REQUEUE, 1, False, 0, Verdict(EXIT_REQUEUE)),
        (KILLED, 0, False, ft_worker.EXIT_AGAIN, None),
        (launch.RankStalled("rank 0 hangs"), 1, False, ft_worker.EXIT_AGAIN, None),
        (KILLED, 2, False, 0, Verdict(2, "rank 1 was ended by SIGKILL")),
        (DataError("line 4"), 0, False, 0, Verdict(2, "line 4")),
        (ZeroDivisionError(), 0, False, 0, Verdict(1)),
        (AssertionError("is not started"), 1, True, 0, Verdict(EXIT_REQUEUE)),
    ],
)
def test_the_worker_fails_only_where_the_run_is_to_start_again(
    tmp_path: Path,
    config: TrainConfig,
    monkeypatch: pytest.MonkeyPatch,
    end: int | Exception,
    begun: int,
    told: bool,
    code: int,
    verdict: Verdict | None,
) -> None:
    desk, resumed = Desk(tmp_path), []
    dump_config(config, desk.config)
    if told:
        desk.told.touch()

    def again(kind: str, config: TrainConfig, restarts: int) -> int:
        assert "RANK" not in os.environ and "LOCAL_RANK" not in os.environ, "the worker is no rank"
        assert restarts == 0, "ft_launcher counts"
        resumed.append(config.checkpoint.resume)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(run, "launch_again", again)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "RESTART_COUNT": str(begun), "MAX_RESTARTS": "2"}.items():
        os.environ[f"TORCHELASTIC_{name}" if name.endswith(("COUNT", "RESTARTS")) else name] = value
    before = signal.getsignal(signal.SIGUSR1)
    try:
        assert ft_worker.main(tmp_path) == code
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert desk.verdict() == verdict and resumed == ([] if told else [begun > 0])


LAUNCHER = """
import os, sys, time
from pathlib import Path
from oppo_megatron.cli.ft_launcher import Desk, Verdict
desk = Desk(Path(sys.argv[1]))
"""
ENDS = {
    "desk.leave(Verdict(75))": 75,
    "desk.leave(Verdict(2, 'rank 1 was ended by SIGKILL'))": "rank 1 was ended by SIGKILL",
    "sys.exit(3)": "ended with exit code 3, and what it started has left no word",
}


@pytest.mark.parametrize("end", ENDS)
def test_what_oppo_train_makes_of_the_end(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    code = LAUNCHER + end
    monkeypatch.setattr(ft_launcher, "launcher_command", lambda folder, *_: [sys.executable, "-c", code, str(folder)])
    expected = ENDS[end]
    if isinstance(expected, int):
        assert ft_launcher.launch_restarting(config, 1) == expected
    else:
        with pytest.raises(launch.RankError, match=expected):
            ft_launcher.launch_restarting(config, 1)


def test_a_signal_before_the_worker_listens_is_not_lost(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that comes with the start: the worker finds that the run was told to stop, or is told again."""
    code = LAUNCHER + "while not desk.told.exists(): time.sleep(0.05)\ndesk.leave(Verdict(75))"
    monkeypatch.setattr(ft_launcher, "launcher_command", lambda folder, *_: [sys.executable, "-c", code, str(folder)])
    start = subprocess.Popen

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    with ending_by_signal():  # else it would end the tests where nobody listens
        assert ft_launcher.launch_restarting(config, 1) == EXIT_REQUEUE


def test_nothing_is_left_of_a_worker_that_was_killed_alone(tmp_path: Path) -> None:
    """Its ranks would go on, beside those of the next worker."""
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    (tmp_path / "worker").write_text(str(orphan.pid))
    Desk(tmp_path).take_over()
    assert orphan.wait(timeout=10) == -signal.SIGKILL and Desk(tmp_path).workers() == [os.getpid()]


@pytest.mark.parametrize(
    ("agent", "version", "said"),
    [
        ("auto", "0.4.1", "by ft_launcher of nvidia-resiliency-ext 0.4.1"),
        ("auto", None, "by torch's elastic agent (nvidia-resiliency-ext is not installed)"),
        ("torch", "0.4.1", "by torch's elastic agent (--agent torch)"),
        ("nvrx", "0.4.1", "by ft_launcher of nvidia-resiliency-ext 0.4.1"),
        ("nvrx", None, None),
    ],
)
def test_who_starts_again_is_said(
    config: TrainConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    agent: str,
    version: str | None,
    said: str | None,
) -> None:
    by: list[str] = []
    monkeypatch.setattr(ft_launcher, "launcher_version", lambda: version)
    monkeypatch.setattr(ft_launcher, "launch_restarting", lambda *_: by.append("ft_launcher") or 0)
    monkeypatch.setattr(run, "launch_again", lambda *_: by.append("torch's") or 0)
    monkeypatch.setattr(run, "load_settings", lambda *_: config)
    monkeypatch.setattr(run, "placed", lambda *_, **__: config)
    monkeypatch.setattr("oppo_megatron.cli.ready.require_ready", lambda *_: None)  # its files are not there
    args = argparse.Namespace(config=None, overrides=[], dry_run=False, max_restarts=3, agent=agent)
    if said is None:
        with pytest.raises(ConfigError, match="--agent nvrx: nvidia-resiliency-ext is not installed"):
            run.run_kind("train", args)
        return
    assert run.run_kind("train", args) == 0
    assert f"oppo train: up to 3 restarts, {said}" in capsys.readouterr().err and said[3:6] == by[0][:3]


def test_the_real_command_line_knows_every_option() -> None:
    real = pytest.importorskip(ft_launcher.LAUNCHER, reason="nvidia-resiliency-ext is not installed here")
    args = real.parse_args(launcher_command(Path("desk"), 1234, 5)[3:])
    assert (args.max_restarts, args.rdzv_endpoint, args.rdzv_conf) == (5, "127.0.0.1:1234", "is_host=0")
    assert args.workers_stop_timeout == ft_launcher.STOP_S and args.local_addr == "127.0.0.1"
    found, command, rest = real.config_from_args(args)
    assert found.max_nodes == found.nproc_per_node == 1 and found.fault_tol_cfg.enable_nic_monitor is False
    assert [command, *rest] == [sys.executable, "-m", ft_launcher.WORKER, "desk"]
