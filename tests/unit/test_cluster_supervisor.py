"""What the process that has started the ranks learns of their ends, without taking them from torch's agent."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from oppo_megatron.cluster.liveness.supervisor import Limits, Supervisor
from oppo_megatron.cluster.rendezvous import MeetingPoint
from oppo_megatron.errors import EXIT_REQUEUE

POINT = MeetingPoint(address="127.0.0.1", port=1, size=2, name="nobody meets here", opens=False, opener="nobody")


def rank(told: Connection) -> None:
    """Ends with the exit code that it is told, or dies by the signal of that number below zero."""
    code = told.recv()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Two children whose process ids are where ranks leave theirs."""
    context, started = multiprocessing.get_context("fork"), []
    for index in range(2):
        theirs, ours = context.Pipe(duplex=False)
        child = context.Process(target=rank, args=(theirs,))
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
    return Supervisor(folder, POINT, Limits(stall_s=0.0, told_s=None, first_s=0.0), lambda: None)


def alive_to(folder: Path) -> Supervisor:
    """A supervisor that has seen the ranks alive."""
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


def test_a_failure_that_the_agent_has_asked_for_first_is_seen_too(
    ranks: list[tuple[BaseProcess, Connection]], tmp_path: Path
) -> None:
    supervisor, (child, tell) = alive_to(tmp_path), ranks[0]
    tell.send(3)
    child.join()
    assert supervisor.someone_failed()


def test_an_end_that_the_agent_is_just_asking_for_is_no_failure(
    ranks: list[tuple[BaseProcess, Connection]], tmp_path: Path
) -> None:
    """Asked for, and not written down yet."""
    supervisor, (child, tell) = alive_to(tmp_path), ranks[0]
    tell.send(0)
    assert os.waitpid(child.pid or 0, 0)[0] == child.pid
    assert not supervisor.someone_failed()
