"""`oppo train --max-restarts` by nvidia-resiliency-ext's `ft_launcher`, if it is installed.

    oppo train       listens to signals, keeps the store for ft_launcher's rendezvous, reads the verdict
      ft_launcher    restarts the worker when it fails, up to N times
        worker       starts all ranks by this package's own launcher, with its watchdogs and supervisor (`ft_worker.py`)

ft_launcher treats every exit code except 0 as a failure, also after a requested stop or invalid input.  So the
worker fails only if the run must be restarted from its last checkpoint; otherwise it leaves a verdict, and ends with 0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil

from oppo_megatron.cli.signals import SignalRelay
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.layout.kernels import import_fault
from oppo_megatron.nesting import read_json
from oppo_megatron.processes import end_with_parent

DISTRIBUTION, LAUNCHER = "nvidia-resiliency-ext", "nvidia_resiliency_ext.fault_tolerance.launcher"
WORKER = "oppo_megatron.cli.ft_worker"
LOG_LEVEL = "FT_LAUNCHER_LOGLEVEL"  # level of ft_launcher's own messages
POLL_S = 0.5
STOP_S = 10  # for processes that an ended worker may have left


@dataclass(frozen=True)
class Verdict:
    """Outcome of the run: an exit code, or an error to show."""

    code: int
    error: str | None = None


@dataclass(frozen=True)
class Desk:
    """A folder that `oppo train` and the workers use to exchange messages."""

    folder: Path

    @property
    def config(self) -> Path:
        """The run's configuration, resolved."""
        return self.folder / "config.yaml"

    @property
    def told(self) -> Path:
        """Marker file: the run was asked to stop."""
        return self.folder / "told"

    @property
    def _verdict(self) -> Path:
        return self.folder / "verdict.json"

    @property
    def _worker(self) -> Path:
        return self.folder / "worker"

    def workers(self) -> list[int]:
        """Process id (and process group of the ranks) of the last worker; None if none has started."""
        with suppress(FileNotFoundError, ValueError):
            return [int(self._worker.read_text(encoding="ascii"))]
        return []

    def take_over(self) -> None:
        """Make the calling process the worker.  Ends the ranks of the previous one, which may have been killed alone."""
        self.end_worker()
        self._worker.write_text(str(os.getpid()), encoding="ascii")

    def end_worker(self) -> None:
        """End the worker and its whole process group."""
        for group in self.workers():
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def leave(self, verdict: Verdict) -> None:
        """Write the worker's verdict atomically."""
        aside = self._verdict.with_suffix(".part")
        aside.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
        aside.replace(self._verdict)

    def verdict(self) -> Verdict | None:
        """Return the verdict; None if no worker has left one."""
        with suppress(FileNotFoundError):
            return Verdict(**read_json(self._verdict.read_text(encoding="utf-8")))
        return None


def launcher_version() -> str | None:
    """Return the version of nvidia-resiliency-ext; None if it is not installed or cannot be imported."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(DISTRIBUTION) if import_fault(f"{LAUNCHER}:main") is None else None
    return None


def restarts_by_ft_launcher(agent: str, restarts: int) -> bool:
    """True if `agent` (auto, nvrx, torch) selects ft_launcher here; logs the choice on stderr.  Raises ConfigError."""
    version = launcher_version() if agent != "torch" else None
    if agent == "nvrx" and version is None:
        raise ConfigError(
            f"--agent nvrx: {DISTRIBUTION} is not installed, or cannot be imported; install it, or use --agent torch"
        )
    why = "--agent torch" if agent == "torch" else f"{DISTRIBUTION} is not installed"
    by = f"torch's elastic agent ({why})" if version is None else f"ft_launcher of {DISTRIBUTION} {version}"
    print(f"oppo train: up to {restarts} restarts, by {by}", file=sys.stderr, flush=True)
    return version is not None


def launch_restarting(config: TrainConfig, restarts: int) -> int:
    """Run all ranks to the end with at most `restarts` restarts; return the exit code.  Raises RankError as `launch` does."""
    from oppo_megatron.cli.launch import RankError
    from oppo_megatron.cluster.rendezvous import LocalMeeting
    from oppo_megatron.config.load import dump_config

    meeting = LocalMeeting.open(str(os.getpid()))
    with tempfile.TemporaryDirectory(prefix="oppo-") as folder:
        desk = Desk(Path(folder))
        dump_config(config, desk.config)
        stopped, code = _supervise(
            launcher_command(desk.folder, meeting.store.port, restarts), desk, saves=config.preempt_deadline_s > 0
        )
        verdict = desk.verdict()
    if verdict is None:
        if stopped:
            return stopped
        raise RankError(
            f"{DISTRIBUTION}'s ft_launcher ended with exit code {code}, and what it started has left no word: it was "
            "killed, or could not be started, as the message of ft_launcher tells; --agent torch does without it"
        )
    if verdict.error is not None:
        raise RankError(verdict.error)
    return verdict.code


def launcher_command(folder: Path, port: int, restarts: int) -> list[str]:
    """Return the ft_launcher command for one worker.  It opens no port: its rendezvous uses our store on the loopback."""
    meeting = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id={os.getpid()} --rdzv-conf=is_host=0"
    limits = f"--max-restarts={restarts} --monitor-interval={POLL_S} --workers-stop-timeout={STOP_S}"
    quiet = "--ft-log-level=ERROR --ft-enable-nic-monitor=false"
    options = f"--nnodes=1 --nproc-per-node=1 --local-addr=127.0.0.1 {meeting} {limits} {quiet}".split()
    worker = ["--no-python", sys.executable, "-m", WORKER, str(folder)]
    return [sys.executable, "-m", LAUNCHER, *options, f"--log-dir={folder / 'logs'}", *worker]


def _supervise(command: Sequence[str], desk: Desk, saves: bool = True) -> tuple[int, int]:
    """Wait until the command ends; return the exit code of a stopped run (0 if not stopped), and the exit code of the
    command.

    `saves`: the run saves when it is asked to stop.
    """
    environment = os.environ | {LOG_LEVEL: os.environ.get(LOG_LEVEL, "ERROR")}
    begun: list[int] = []
    relay = SignalRelay(desk.workers, lambda: [pid for each in begun for pid in _tree(each)], saves)
    with relay.listening():  # before the start: an early signal would end only this process
        # S603: this package's own command, without a shell.  In its own session: a signal to the process group is for this
        # process.
        ends = partial(end_with_parent, os.getpid())
        process = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=ends)  # noqa: S603
        begun.append(process.pid)
        try:
            while process.poll() is None:
                if relay.code:
                    desk.told.touch()
                    relay.tell()  # again: the worker may have been starting
                time.sleep(POLL_S)
        finally:
            for pid in _tree(process.pid) if process.poll() is None else []:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            desk.end_worker()
    return relay.code, process.returncode


def _tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [*(child.pid for child in process.children(recursive=True)), pid]
    return []
