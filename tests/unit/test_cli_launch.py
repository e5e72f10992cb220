"""The launcher: the ranks that an environment means, and how a failed rank is reported."""

import argparse
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from oppo_megatron.cli import run
from oppo_megatron.cli.launch import RankKilled, external_ranks, launch, quiet_torch, speaks_for_all
from oppo_megatron.cluster.rendezvous import is_loopback, loopback_store
from oppo_megatron.cluster.world import open_world
from oppo_megatron.config.model import RuntimeConfig
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import EXIT_AGAIN, EXIT_REQUEUE, ConfigError
from tests.support.configs import least_config
from tests.support.processes import free_port, listeners, marked, python_path, runs, wait_for

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
RANK_5 = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20017"}


def by_srun(tasks: str, node: str = "0") -> dict[str, str]:
    return SRUN | {"SLURM_JOB_ID": "20017", "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}


@pytest.mark.parametrize(("environment", "ranks", "speaks"), [
    ({}, None, True), ({"SLURM_PROCID": "0"}, None, True), ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None, True),
    (TORCHRUN, TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, False), (by_srun("4(x2)", "1"), RANK_5 | {"LOCAL_WORLD_SIZE": "4"}, False),
    (by_srun("5,3", "1"), RANK_5 | {"LOCAL_WORLD_SIZE": "3"}, False),
    (by_srun("2(x2),1", "2"), RANK_5 | {"LOCAL_WORLD_SIZE": "1"}, False),
    (by_srun("8") | {"SLURM_PROCID": "0"}, RANK_5 | {"RANK": "0", "LOCAL_WORLD_SIZE": "8"}, True),
])  # fmt: skip
def test_ranks_of_an_environment(environment: dict[str, str], ranks: dict[str, str] | None, speaks: bool) -> None:
    assert external_ranks(environment) == ranks and speaks_for_all(environment) == speaks


@pytest.mark.parametrize(("environment", "expected"), [
    ({"RANK": "0"}, "WORLD_SIZE is not a number"), ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is not a number"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "ranks count from 0"), ({**SRUN, "SLURM_NNODES": "2"}, "MASTER_ADDR is not set"),
])  # fmt: skip
def test_wrong_environment(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        external_ranks(environment)


def test_threads_wait_asleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, spins in (({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)):
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            monkeypatch.setenv(name, given.get(name, ""))  # so that it is as before after the test
            if name not in given:
                monkeypatch.delenv(name)
        quiet_torch()
        assert os.environ.get("GOMP_SPINCOUNT") == spins


ENTRY = """
import atexit, multiprocessing, os, signal, subprocess, sys, time
from oppo_megatron.errors import EXIT_AGAIN, DataError, StallError

def run(kind, path):
    rank = int(os.environ["RANK"])
    if kind == "seen":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        print(" ".join(os.environ[name] for name in names), path, flush=True)
        return
    if kind == "rollback":
        return EXIT_AGAIN
    if kind == "elsewhere":
        print(rank, os.getpid(), flush=True)
        return
    if kind == "long":
        os.write(1, f"{os.getpid()}\\n".encode())  # at once: two ranks write
        time.sleep(100)
    import torch
    import torch.distributed as dist
    if kind == "listens":
        from oppo_megatron.cluster.world import open_world
        from oppo_megatron.config.model import RuntimeConfig
        from tests.support.processes import listeners
        with open_world(RuntimeConfig(device="cpu")):
            dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
            pids = [os.getpid()] if rank else [os.getpid(), os.getppid()]
            found = [address for pid in pids for address, _ in listeners(pid)]
            os.write(2, f"LISTENS {' '.join(found)}\\n".encode())
            dist.barrier()
        return
    dist.init_process_group("gloo")
    dist.barrier()  # rank 0 serves the store: gone before its peer has joined, it would take it along
    if kind == "abort":  # as threads of the process groups may do, once Python is clearing up
        atexit.register(os.abort)
        raise DataError("line 4 is not JSON; correct it") if rank == 0 else TypeError("a bug of ours")
    if kind == "aborted" and rank == 0:  # as NCCL does to the peer of a rank that has failed
        while not os.path.exists(os.path.join(os.environ["OPPO_FAILURES"], "1.input.json")):
            time.sleep(0.01)
        os.abort()
    if kind in ("wrong input", "aborted") and rank == 1:
        raise DataError("line 3 is not JSON; correct it")
    if kind == "full disk" and rank == 1:
        raise OSError(28, "No space left on device", "runs/x/metrics.jsonl")
    if kind == "defect" and rank == 0:
        raise TypeError("a bug of ours")
    if kind == "stalled" and rank == 0:
        raise StallError("rank 0 waited for a message")
    if kind == "stalled":
        raise KeyError("the cause")
    if kind == "killed unseen" and rank == 1:  # a busy machine does not let the launcher run for a while
        launcher = multiprocessing.parent_process().pid
        subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {launcher}"])
        os.kill(launcher, signal.SIGSTOP)
    if "killed" in kind and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind != "fine":
        dist.barrier()  # its peer never comes
    dist.destroy_process_group()
"""

PARENT = """
import sys
from types import SimpleNamespace
from oppo_megatron.cli.launch import launch
from oppo_megatron.errors import OppoError
if __name__ == "__main__":
    deadline, *kinds = sys.argv[1:]
    config = SimpleNamespace(preempt_deadline_s=float(deadline)) if deadline else "c.yaml"
    for kind in kinds:
        try:
            code = launch(kind, config, 2, entry="entry_of_test:run")
        except OppoError as error:
            print(error, file=sys.stderr)
            code = 2
        print(f"exit code of {kind}: {code}", file=sys.stderr, flush=True)
    sys.exit(code)
"""

KINDS = {
    "fine": (0, ""), "wrong input": (2, "rank 1: line 3 is not JSON; correct it\n"),
    "aborted": (2, "rank 1: line 3 is not JSON; correct it\n"), "rollback": (EXIT_AGAIN, ""),
    "abort": (2, "rank 0: line 4 is not JSON; correct it\n"), "killed": (2, "rank 1 was ended by SIGKILL"),
    "killed unseen": (2, "rank 1 was ended by SIGKILL"),
    "defect": (1, "TypeError: a bug of ours"), "stalled": (1, "KeyError: 'the cause'"),
    "full disk": (2, "rank 1: [Errno 28] No space left on device: 'runs/x/metrics.jsonl'"), "listens": (0, "LISTENS"),
}  # fmt: skip
"""How two ranks end: the exit code and the message."""

RANK = """
import sys
from oppo_megatron.cli import main, run
from oppo_megatron.cli.launch import launch

run.run = lambda args: launch("abort", "c.yaml", 2, entry="entry_of_test:run")
sys.exit(main.main(["train", "c.yaml"]))
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "entry_of_test.py").write_text(ENTRY)
    (folder / "parent.py").write_text(PARENT)
    return folder


def started(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PYTHONPATH": python_path(folder, Path(__file__).resolve().parents[2]), **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *arguments], cwd=folder, stdout=pipe, stderr=pipe, text=True, env=environment)


@pytest.fixture(scope="module")
def outcomes(two_ranks: Path) -> dict[str, tuple[int, str]]:
    _, said = started(two_ranks, "parent.py", "", *KINDS).communicate(timeout=240)
    found: dict[str, tuple[int, str]] = {}
    for kind in KINDS:
        before, ending, said = said.partition(f"exit code of {kind}: ")
        assert ending, before
        code, _, said = said.partition("\n")
        found[kind] = (int(code), before)
    return found


@pytest.mark.slow
def test_ranks_that_run_here_or_in_a_process_of_their_own(
    two_ranks: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(two_ranks))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert launch("seen", "c.yaml", 1, entry="entry_of_test:run") == 0
    assert capfd.readouterr().out.startswith("0 1 0 ") and "RANK" not in os.environ
    assert launch("elsewhere", "c.yaml", 1, entry="entry_of_test:run", in_process=False) == 0
    rank, pid = capfd.readouterr().out.split()
    assert rank == "0" and int(pid) != os.getpid()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launch("seen", "c.yaml", 4, entry="entry_of_test:run") == 0 and capfd.readouterr().out == "1 4 1 1234 c.yaml\n"
    assert launch("rollback", "c.yaml", 4, entry="entry_of_test:run") == EXIT_REQUEUE, "its launcher starts it again"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_local_ranks(outcomes: dict[str, tuple[int, str]], kind: str) -> None:
    expected, message = KINDS[kind]
    code, said = outcomes[kind]
    assert code == expected, said
    assert message in said and (kind != "wrong input" or said == message)
    assert said.count("Traceback") == (1 if kind in ("defect", "stalled") else 0)
    if kind == "listens":
        lines = [line.split()[1:] for line in said.splitlines() if line.startswith("LISTENS")]
        assert len(lines) == 2 and sum(map(len, lines)) >= 3, said
        assert all(ipaddress.ip_address(address).is_loopback for line in lines for address in line), lines


def test_a_rank_alone_and_a_store_listen_on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = listeners(os.getpid())
    with open_world(RuntimeConfig(device="cpu").with_threads(1), {}):
        opened = listeners(os.getpid()) - before
        assert all(ipaddress.ip_address(address).is_loopback for address, _ in opened), opened
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "a later run may be of several hosts"
    assert all(is_loopback(address) for address in ("localhost", "127.0.0.1", "127.8.8.8", "::1"))
    assert not any(is_loopback(address) for address in ("10.0.0.2", "node-1", "0.0.0.0", ""))
    store = loopback_store(0, timedelta(seconds=5))
    store.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        loopback_store(store.port, timedelta(seconds=5))
    with socket.create_connection(("127.0.0.1", store.port), timeout=5):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_ranks_that_would_save_nothing_end_with_the_first_signal(two_ranks: Path, number: signal.Signals) -> None:
    """`preempt_deadline_s: 0`: with the exit code of a process that leaves the signal alone, and nobody starts it again."""
    parent = started(two_ranks, "parent.py", "0", "long")
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=240)
    assert parent.returncode == 128 + number and "saves what" not in errors, errors
    wait_for(lambda: not any(map(runs, pids)))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", pytest.param("fork server", marks=pytest.mark.long)])
def test_nothing_outlives_a_launcher_or_a_fork_server_that_is_killed(two_ranks: Path, victim: str) -> None:
    parent = started(two_ranks, "parent.py", "", "long", OPPO_TEST=str(two_ranks / victim))
    mark = f"OPPO_TEST={two_ranks / victim}"
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    parent.send_signal(signal.SIGSTOP)
    os.kill(pids[0], signal.SIGSTOP)
    time.sleep(0.5)
    assert {*pids, parent.pid} <= {*marked(mark)} and marked(f"OPPO_LAUNCHER={parent.pid}")
    os.kill(parent.pid if victim == "launcher" else psutil.Process(pids[0]).ppid(), signal.SIGKILL)
    parent.send_signal(signal.SIGCONT)
    _, errors = parent.communicate(timeout=60)
    wait_for(lambda: not marked(mark), 15)
    if victim == "fork server":
        assert parent.returncode == 2 and "was killed, and they end with it" in errors, errors


def test_a_fork_server_whose_launcher_has_ended_first_ends() -> None:
    program, gone = "import oppo_megatron.cluster.fork_server; print('still here')", {"OPPO_LAUNCHER": "0"}
    ended = subprocess.run([sys.executable, "-c", program], env=os.environ | gone, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, ""), ended


@pytest.mark.slow
def test_ranks_of_another_launcher_fail_with_their_own_exit_code(two_ranks: Path) -> None:
    (two_ranks / "rank.py").write_text(RANK)
    port = str(free_port())
    ranks = [started(two_ranks, "rank.py", RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port) for rank in range(2)]
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 1], errors
    assert errors[0].endswith("[rank 0]: line 4 is not JSON; correct it\n") and "TypeError: a bug of ours" in errors[1]


@pytest.mark.parametrize(("ends", "restarts", "code", "resumed"), [
    ([EXIT_AGAIN, EXIT_AGAIN, 0], 0, 0, [False, True, True]),
    ([EXIT_AGAIN, "killed", EXIT_AGAIN, 0], 1, 0, [False, True, True, True]),
    ([EXIT_AGAIN, EXIT_REQUEUE], 0, EXIT_REQUEUE, [False, True]), ([EXIT_AGAIN, "killed"], 0, None, [False, True]),
    (["killed", "asked to stop"], 1, EXIT_REQUEUE, [False, True]),
])  # fmt: skip
def test_a_run_that_goes_back_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[int | str], restarts: int, code: int | None, resumed: list[bool]
) -> None:
    config = least_config(tmp_path, guards={"action": "rollback"})
    seen, left = [], list(ends)

    def launched(kind: str, config: TrainConfig, world: int, *, in_process: bool) -> int:
        assert not in_process, "each start has a process of its own"
        seen.append(config.resume)
        end = left.pop(0)
        if end == "killed":
            raise RankKilled("rank 0 was ended by SIGKILL")
        if end == "asked to stop":
            signal.raise_signal(signal.SIGTERM)  # before the ranks run
        return int(end)

    monkeypatch.setattr(run, "launch", launched)
    monkeypatch.setattr(run, "load_settings", lambda *_: config)
    monkeypatch.setattr(run, "resolve_placement", lambda *_, **__: config)
    monkeypatch.setattr(run, "require_ready", lambda *_: None)  # its files are not there
    args = argparse.Namespace(command="train", config=None, overrides=[], dry_run=False, resume=False, max_restarts=restarts)
    with pytest.raises(RankKilled) if code is None else nullcontext():
        assert run.run(args) == code
    assert seen == resumed and not left


@pytest.mark.parametrize(("name", "code"), [("INT", -signal.SIGINT), ("TERM", 75), ("HUP", 75), ("USR1", 75)])
def test_a_signal_before_any_rank_exists_ends_the_start(name: str, code: int) -> None:
    program = (
        "import os, signal, time\n"
        "from oppo_megatron.cli.signals import SignalRelay\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with SignalRelay().listening():\n"
        f"    os.kill(os.getpid(), signal.SIG{name})\n"
        "    time.sleep(5)\n"
    )  # in a process of its own: this one may have ranks of other tests
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
