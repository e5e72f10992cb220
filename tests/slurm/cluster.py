"""A Slurm cluster of two nodes on this machine: `python -m tests.slurm.cluster COMMAND` runs a command with its SLURM_CONF.
Needs a slurmd built with --enable-multiple-slurmd, as Debian's is (package slurm-wlm), and no systemd, database or cgroups."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = ("oppo0", "oppo1")
START_S = 30.0
KILL_WAIT_S = 10

CONFIGURATION = """
ClusterName=oppo
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
KillWait={kill_wait_s}
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def missing() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


@dataclass(frozen=True)
class Cluster:
    """A running cluster.  `environment` lets Slurm's commands find it."""

    root: Path
    environment: dict[str, str]

    def call(self, *command: str | Path, **options: object) -> str:
        """Output of one of Slurm's commands; raises CalledProcessError where it fails."""
        return subprocess.run(
            [str(part) for part in command], env=self.environment, check=True, text=True, stdout=subprocess.PIPE,
            timeout=60, **options,
        ).stdout  # fmt: skip

    def job(self, number: str) -> dict[str, str]:
        fields = self.call("scontrol", "show", "job", "-o", number).splitlines()[0].split()
        return dict(field.split("=", 1) for field in fields if "=" in field)


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster in a temporary folder; no daemon and no job outlives the block."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        root = Path(folder)
        root.chmod(0o711)  # munge's socket must be within everybody's reach, and nobody may replace it
        with _daemons(root) as cluster:
            yield cluster


@contextlib.contextmanager
def _daemons(root: Path) -> Iterator[Cluster]:
    cluster = Cluster(root, os.environ | {"SLURM_CONF": str(root / "slurm.conf"), "PATH": _path()})
    (root / "munge").mkdir(mode=0o755)
    (root / "state").mkdir()
    _write_configuration(root)
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        log = (root / f"{command[0]}-{len(daemons)}.out").open("wb")
        with log:
            daemons.append(subprocess.Popen(command, env=cluster.environment, stdout=log, stderr=log, start_new_session=True))

    try:
        _start_munge(root, start)
        _wait_until((root / "munge" / "socket").exists, daemons, root)
        start("slurmctld", "-D", "-c", "-f", str(root / "slurm.conf"))
        for node in NODES:
            (root / f"spool-{node}").mkdir()
            start("slurmd", "-D", "-N", node, "-f", str(root / "slurm.conf"))
        _wait_until(lambda: _num_idle(cluster) == len(NODES), daemons, root)
        yield cluster
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            _cancel_all(cluster)
        _end(daemons)


def _start_munge(root: Path, start: Callable[..., None]) -> None:
    folder = root / "munge"
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    files = {"key-file": key, "socket": folder / "socket", "pid-file": folder / "pid", "log-file": folder / "log"}
    options = [f"--{name}={path}" for name, path in (files | {"seed-file": folder / "seed"}).items()]
    start("munged", "--foreground", "--num-threads=2", *options)


def _write_configuration(root: Path) -> None:
    ports = free_ports(1 + len(NODES))
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
        for node, port in zip(NODES, ports[1:], strict=True)
    )
    text = CONFIGURATION.format(
        host=host, ctld_port=ports[0], user=getpass.getuser(), root=root, nodes=nodes, kill_wait_s=KILL_WAIT_S
    )
    (root / "slurm.conf").write_text(text)


def _num_idle(cluster: Cluster) -> int:
    try:
        states = cluster.call("sinfo", "-h", "-N", "-o", "%T", stderr=subprocess.DEVNULL)
    except subprocess.SubprocessError:
        return 0
    return states.split().count("idle")


def _wait_until(ready: Callable[[], bool], daemons: Sequence[subprocess.Popen[bytes]], root: Path) -> None:
    until = time.monotonic() + START_S
    while not ready():
        dead = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if dead or time.monotonic() > until:
            logs = [path for pattern in ("*.out", "*.log", "munge/log") for path in sorted(root.glob(pattern))]
            told = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in logs)
            raise RuntimeError(f"the cluster does not come up; ended: {dead or 'none'}\n{told}")
        time.sleep(0.1)


def _cancel_all(cluster: Cluster) -> None:
    cluster.call("scancel", "--user", getpass.getuser(), stderr=subprocess.DEVNULL)
    until = time.monotonic() + KILL_WAIT_S + 5
    while cluster.call("squeue", "-h", stderr=subprocess.DEVNULL) and time.monotonic() < until:
        time.sleep(0.2)


def _end(daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    """The last first, so that nobody misses the one that it talks to."""
    for daemon in reversed(daemons):
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(5)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _path() -> str:
    """Daemons are where only root's PATH looks."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def main(command: Sequence[str]) -> int:
    if lacking := missing():
        print(f"not installed: {', '.join(lacking)}; on Debian: apt install slurm-wlm munge", file=sys.stderr)
        return 2
    with running_cluster() as cluster:
        return subprocess.call(command, env=cluster.environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
