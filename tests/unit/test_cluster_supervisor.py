"""Ranks are forked with what processes of their own would have; who starts them learns of their ends, and torch's agent does."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest

from oppo_megatron.cli.launch import GOOD_ENDS
from oppo_megatron.cluster import rank_processes
from oppo_megatron.cluster.liveness import supervisor as supervisor_module
from oppo_megatron.cluster.liveness.failures import ended_well, read_failures
from oppo_megatron.cluster.liveness.stalls import Note, board_at
from oppo_megatron.cluster.liveness.supervisor import Limits, Supervisor
from oppo_megatron.cluster.liveness.watchdog import verdict_within_s
from oppo_megatron.cluster.rank_processes import LONGEST_FOLDER, start_method
from oppo_megatron.cluster.rendezvous import MeetingPoint, loopback_store
from oppo_megatron.errors import EXIT_REQUEUE
from tests.support.processes import own_lines, python_path

ENTRY = """
import os, signal, sys, time

def run(kind, path):
    if kind == "surroundings":
        os.write(1, f"{os.environ.get('SET')} {os.environ.get('GONE')} {'oppo_megatron.train.entry' in sys.modules}\\n".encode())
        os.write(2, b"an error\\n")
        return 0
    told = []
    for number in signal.SIGTERM, signal.SIGUSR1:  # the latter is what the parent makes of the former
        signal.signal(number, lambda number, frame: told.append(number))
    os.write(1, b"ready\\n")
    while not told:
        time.sleep(0.05)
    return 0
"""
PARENT = """
import multiprocessing, os, sys
from types import SimpleNamespace
from oppo_megatron.cli.launch import launch

def at(kind):
    config = SimpleNamespace(runtime=SimpleNamespace(device=sys.argv[2], meeting_s=60.0))
    return launch(kind, config, 2, entry="entry_of_test:run")

if __name__ == "__main__":
    if sys.argv[1] == "stops":
        sys.exit(at("stops"))
    if sys.argv[3:]:  # someone else has begun the process that ranks are forked from
        first = multiprocessing.get_context("forkserver").Process(target=os.getpid)
        first.start()
        first.join()
    os.environ["GONE"] = "there"
    assert at("surroundings") == 0
    del os.environ["GONE"]
    os.environ["SET"] = "new"
    with open("elsewhere", "w") as file:
        os.dup2(file.fileno(), 1)
    assert at("surroundings") == 0
"""


@pytest.mark.parametrize(("device", "hidden", "driver", "expected"), [
    ("cpu", None, True, "forkserver"), ("auto", None, False, "forkserver"), ("auto", None, True, "spawn"),
    ("auto", "", True, "forkserver"), ("auto", "0", True, "spawn"), ("cuda", "", False, "spawn"),
])  # fmt: skip
def test_what_may_use_cuda_is_not_forked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, hidden: str | None, driver: bool, expected: str
) -> None:
    monkeypatch.setattr(rank_processes, "DRIVERS", (tmp_path / "none", tmp_path if driver else tmp_path / "none"))
    environment = {} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden}
    config = SimpleNamespace(runtime=SimpleNamespace(device=device))
    assert start_method(config, environment) == expected
    monkeypatch.setattr(sys, "platform", "darwin")
    assert start_method(config, environment) == "spawn"


@pytest.mark.long
@pytest.mark.parametrize("excess", [0, 1])
def test_a_folder_for_temporary_files_may_have_a_long_name(monkeypatch: pytest.MonkeyPatch, folder: Path, excess: int) -> None:
    """A batch system's; the name of a socket is short."""
    temporary = folder / ("x" * (LONGEST_FOLDER + excess - len(str(folder)) - 1))
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    out, _ = outcome(started(folder, "surroundings", "cpu"))
    assert out == [f"None there {not excess}"] * 2
    assert not [*temporary.iterdir()], "nothing is left"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "entry_of_test.py").write_text(ENTRY)
    (tmp_path / "parent.py").write_text(PARENT)
    return tmp_path


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment["PYTHONPATH"] = python_path(folder, Path(__file__).resolve().parents[2])
    command, pipe = [sys.executable, "parent.py", *arguments], subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)


def outcome(parent: subprocess.Popen[str]) -> tuple[list[str], list[str]]:
    out, errors = parent.communicate(timeout=240)
    assert parent.returncode == 0, errors
    return out.splitlines(), own_lines(errors)


@pytest.mark.parametrize(("device", "before", "imported"), [
    pytest.param("cpu", [], True, marks=pytest.mark.long, id="forked"),
    pytest.param("cpu", ["by another"], False, id="forked from what another began"),
    pytest.param("cuda", [], False, marks=pytest.mark.long, id="spawned"),
])  # fmt: skip
def test_ranks_have_the_surroundings_of_who_starts_them_now(folder: Path, device: str, before: list[str], imported: bool) -> None:
    assert outcome(started(folder, "surroundings", device, *before)) == ([f"None there {imported}"] * 2, ["an error"] * 4)
    assert (folder / "elsewhere").read_text().splitlines() == [f"new None {imported}"] * 2


def test_a_signal_to_the_whole_process_group_leaves_the_ranks_their_exit_codes(folder: Path) -> None:
    """Slurm or `kill -- -PGID` sends it; the process between would else die of it, and with it the ranks' exit codes."""
    parent = started(folder, "stops", "cpu")
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    os.killpg(parent.pid, signal.SIGTERM)
    assert outcome(parent) == ([], [])


Ranks = list[tuple[BaseProcess, Connection]]
POINT = MeetingPoint(address="127.0.0.1", port=1, size=2, name="nobody meets here", opens=False, opener="nobody")


def rank(told: Connection, index: int, folder: Path) -> None:
    """Ends with the exit code that it is told, or dies by the signal of that number below zero."""
    code = told.recv()
    if code < 0:
        os.kill(os.getpid(), -code)
    if code in GOOD_ENDS:
        ended_well(index, folder)
    os._exit(code)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    context, started = multiprocessing.get_context("fork"), []
    for index in range(2):
        theirs, ours = context.Pipe(duplex=False)
        child = context.Process(target=rank, args=(theirs, index, tmp_path))
        child.start()
        (tmp_path / f"{index}.pid").write_text(str(child.pid))
        started.append((child, ours))
    yield started
    for child, _ in started:
        child.kill()
        child.join()


def new_supervisor(folder: Path) -> Supervisor:
    return Supervisor(folder, POINT, Limits(stall_s=0.0, asked_s=None, first_s=0.0), lambda: None)


@pytest.mark.parametrize(("code", "failed"), [(0, False), (EXIT_REQUEUE, False), (3, True), (-9, True)])
@pytest.mark.parametrize("seen_alive", [True, False])
def test_an_end_is_seen_and_left_to_the_agent(ranks: Ranks, tmp_path: Path, code: int, failed: bool, seen_alive: bool) -> None:
    supervisor = new_supervisor(tmp_path)
    assert not (seen_alive and supervisor.someone_failed())
    for child, tell in ranks:
        tell.send(code)
        assert os.waitid(os.P_PID, child.pid or 0, os.WEXITED | os.WNOWAIT), "it has ended and nobody has asked for it"
    assert [supervisor.someone_failed() for _ in range(3)] == [failed] * 3
    for child, _ in ranks:  # the agent, which would be told of nothing if someone had asked before
        pid, status = os.waitpid(child.pid or 0, os.WNOHANG)
        assert pid == child.pid and os.waitstatus_to_exitcode(status) == code


@pytest.mark.parametrize(("code", "failed"), [(0, False), (3, True)])
def test_an_end_that_the_agent_has_asked_for_first_is_seen_too(ranks: Ranks, tmp_path: Path, code: int, failed: bool) -> None:
    supervisor, (child, tell) = new_supervisor(tmp_path), ranks[0]
    assert not supervisor.someone_failed()
    tell.send(code)
    assert os.waitpid(child.pid or 0, 0)[0] == child.pid
    assert supervisor.someone_failed() == failed


SPEED = 10.0


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """The supervisor's clock, on which time passes ten times as fast."""
    started = time.monotonic()

    def clock() -> float:
        return started + SPEED * (time.monotonic() - started)

    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=clock, time=time.time))
    monkeypatch.setattr(supervisor_module, "POLL_S", supervisor_module.POLL_S / SPEED)
    return clock


@pytest.fixture
def point() -> Iterator[MeetingPoint]:
    store = loopback_store(0, timedelta(seconds=20))
    yield MeetingPoint("127.0.0.1", store.port, 2, "a run", False, "this test")


def ended_by_kill(supervisor: Supervisor, ranks: Ranks, clock: Callable[[], float]) -> float:
    for child, _ in ranks:
        os.kill(child.pid or 0, signal.SIGSTOP)
    with supervisor.guarding():
        for child, _ in ranks:
            child.join(20)
        at = clock()
    assert [child.exitcode for child, _ in ranks] == [-signal.SIGKILL] * 2
    return at


def test_ranks_that_cannot_give_up_their_save_are_killed_8_s_later(
    ranks: Ranks, tmp_path: Path, point: MeetingPoint, hurried: Callable[[], float]
) -> None:
    told = hurried()
    supervisor = Supervisor(tmp_path, point, Limits(0.0, 3.0, 0.0), lambda: hurried() - told)
    assert 11.0 <= ended_by_kill(supervisor, ranks, hurried) - told < 300.0, "a busy machine may be late"


def test_where_no_rank_can_report_the_notes_are_read_and_the_ranks_ended(
    ranks: Ranks, tmp_path: Path, point: MeetingPoint, hurried: Callable[[], float]
) -> None:
    board = board_at(point)
    for note in Note(0, 7, 5, "step 3, wait_scores actor", True, 0.0), Note(1, 9, 4, "step 3, prefill critic", False, 0.0):
        assert board.exchange(note, 20.0)
    begun, stall_s = hurried(), 4.0
    supervisor = Supervisor(tmp_path, point, Limits(stall_s, None, 0.0), lambda: None)
    assert ended_by_kill(supervisor, ranks, hurried) - begun >= stall_s + verdict_within_s(stall_s), "watchdogs come first"
    (failure,) = read_failures(tmp_path)
    assert failure.kind == "stall" and "the run has stalled (stall_deadline_s is 4)" in failure.message
    for rank, what in enumerate(["step 3, wait_scores actor", "step 3, prefill critic"]):
        assert f"rank {rank} did not answer" in failure.message and f"s ago: {what}" in failure.message
