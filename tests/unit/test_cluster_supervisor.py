"""The starter of the ranks learns of their ends, without taking them from torch's agent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest

from oppo_megatron.cli.launch import GOOD_ENDS
from oppo_megatron.cluster.liveness import supervisor as supervisor_module
from oppo_megatron.cluster.liveness.failures import ended_well, read_failures
from oppo_megatron.cluster.liveness.stalls import Note, board_at
from oppo_megatron.cluster.liveness.supervisor import Limits, Supervisor
from oppo_megatron.cluster.liveness.watchdog import verdict_within_s
from oppo_megatron.cluster.rendezvous import MeetingPoint, loopback_store
from oppo_megatron.errors import EXIT_REQUEUE

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
def ranks(tmp_path: Path) -> Iterator[list[tuple[BaseProcess, Connection]]]:
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


def ended(pid: int | None) -> bool:
    """Waits for the end of a child and leaves it to be asked for."""
    assert pid is not None
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) is not None


def new_supervisor(folder: Path) -> Supervisor:
    return Supervisor(folder, POINT, Limits(stall_s=0.0, asked_s=None, first_s=0.0), lambda: None)


def alive_to(folder: Path) -> Supervisor:
    supervisor = new_supervisor(folder)
    assert not supervisor.someone_failed()
    return supervisor


@pytest.mark.parametrize(("code", "failed"), [(0, False), (EXIT_REQUEUE, False), (3, True), (-9, True)])
@pytest.mark.parametrize("seen_alive", [True, False])
def test_an_end_is_seen_and_left_to_the_agent(
    ranks: list[tuple[BaseProcess, Connection]], tmp_path: Path, code: int, failed: bool, seen_alive: bool
) -> None:
    supervisor = alive_to(tmp_path) if seen_alive else new_supervisor(tmp_path)
    for child, tell in ranks:
        tell.send(code)
        assert ended(child.pid)
    assert [supervisor.someone_failed() for _ in range(3)] == [failed] * 3
    for child, _ in ranks:  # the agent, which would be told of nothing if someone had asked before
        pid, status = os.waitpid(child.pid or 0, os.WNOHANG)
        assert pid == child.pid and os.waitstatus_to_exitcode(status) == code


@pytest.mark.parametrize(("code", "failed"), [(0, False), (3, True)])
def test_an_end_that_the_agent_has_asked_for_first_is_seen_too(
    ranks: list[tuple[BaseProcess, Connection]], tmp_path: Path, code: int, failed: bool
) -> None:
    supervisor, (child, tell) = alive_to(tmp_path), ranks[0]
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


def ended_by_kill(supervisor: Supervisor, ranks: list[tuple[BaseProcess, Connection]], clock: Callable[[], float]) -> float:
    for child, _ in ranks:
        os.kill(child.pid or 0, signal.SIGSTOP)
    with supervisor.guarding():
        for child, _ in ranks:
            child.join(20)
        at = clock()
    assert [child.exitcode for child, _ in ranks] == [-signal.SIGKILL] * 2
    return at


def test_ranks_that_cannot_give_up_their_save_are_killed_8_s_later(
    ranks: list[tuple[BaseProcess, Connection]], tmp_path: Path, point: MeetingPoint, hurried: Callable[[], float]
) -> None:
    told = hurried()
    supervisor = Supervisor(tmp_path, point, Limits(0.0, 3.0, 0.0), lambda: hurried() - told)
    assert 11.0 <= ended_by_kill(supervisor, ranks, hurried) - told < 300.0, "a busy machine may be late"


def test_where_no_rank_can_report_the_notes_are_read_and_the_ranks_ended(
    ranks: list[tuple[BaseProcess, Connection]], tmp_path: Path, point: MeetingPoint, hurried: Callable[[], float]
) -> None:
    """Both are stopped, so no watchdog says that the run stands still."""
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
