"""Which rank stands still, on a clock that only the test moves; and the watchdog's notes over a real store."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.liveness import watchdog as watchdog_module
from oppo_megatron.cluster.liveness.stalls import Board, Note, Watch
from oppo_megatron.cluster.liveness.watchdog import Watchdog
from oppo_megatron.cluster.rendezvous import loopback_store


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A watch over ranks whose notes the test writes; a look every second."""

    def __init__(self, size: int, **options: float):
        self.clock, self.beats, self.number = Clock(), [0] * size, 0
        self.waits, self.silent, self.what = [False] * size, set[int](), ["work"] * size
        self.watch = Watch(range(size), 10.0, self.clock, **options)

    def look(self, seconds: int, moving: tuple[int, ...] = (), reaches: bool = True) -> bool:
        """So many seconds pass, in which these ranks move; whether the run has stalled."""
        for _ in range(seconds):
            self.clock.now += 1
            self.number += 1
            for rank in moving:
                self.beats[rank] += 1
            told = [self.note(rank) for rank in range(len(self.beats)) if rank not in self.silent]
            self.watch.observe(told if reaches else told[:1], reaches_others=reaches)
        return self.watch.stalled(0)

    def note(self, rank: int) -> Note:
        still_s = self.watch.still_s(rank)
        return Note(rank, self.number, self.beats[rank], self.what[rank], self.waits[rank], still_s)


def test_a_rank_that_works_must_move_and_one_that_waits_may_wait_for_one_that_moves() -> None:
    bench = Bench(2)
    bench.waits[0] = True
    assert not bench.look(60, moving=(1,)), "rank 0 waits for one that is slow"
    assert not bench.look(9)
    assert bench.look(2), "rank 1 does not move"
    bench.what[1] = "reward of sequence 3"
    bench.look(1)
    told = bench.watch.describe(0, [0, 1], "rank 0")
    assert told == (
        "the run has stalled (stall_deadline_s is 10): rank 1 has not moved for 11 s: reward of sequence 3; "
        "rank 0 waited 70 s in vain: work"
    )


def test_a_rank_that_works_and_does_not_move_stalls_a_run_in_which_others_move() -> None:
    bench = Bench(3)
    assert not bench.look(9, moving=(1, 2)) and bench.look(2, moving=(1, 2))


def test_ranks_that_all_wait_for_each_other() -> None:
    bench = Bench(2)
    bench.waits = [True, True]
    assert not bench.look(9) and bench.look(2)
    assert "because its ranks wait for each other (" in bench.watch.describe(0, [0, 1], "rank 0")


def test_a_silent_rank_is_named_with_its_last_words() -> None:
    bench = Bench(3)
    bench.what[2] = "step 3, decode actor m0 c12 s2"
    bench.look(3, moving=(0, 1, 2))
    bench.silent.add(2)
    assert not bench.look(9, moving=(0, 1)) and bench.look(2, moving=(0, 1))
    told = bench.watch.describe(0, [0, 1], "rank 0")
    assert told.startswith("the run has stalled (stall_deadline_s is 10): rank 2 did not answer")
    assert "it last said, 11 s ago: step 3, decode actor m0 c12 s2; rank 0 has not moved for 0 s: work" in told


def test_time_in_which_the_observer_did_not_run_is_not_held_against_anyone() -> None:
    """The whole job was stopped for an hour, and goes on."""
    bench = Bench(2)
    bench.look(2, moving=(0, 1))
    bench.clock.now += 3600
    assert not bench.look(5, moving=(0, 1))


def test_where_the_store_does_not_answer_a_rank_judges_itself_alone() -> None:
    bench = Bench(3)
    bench.waits[0] = True
    bench.look(2, moving=(0, 1, 2))
    assert not bench.look(60, moving=(0,), reaches=False), "it moves: nothing is wrong with it"
    assert not bench.look(9, reaches=False) and bench.look(2, reaches=False)
    told = bench.watch.describe(0, [0], "rank 2")
    assert "kept by rank 2, has not answered for" in told and "rank 0 waited" in told
    assert not Bench(2).look(9, reaches=False)


def test_the_first_note_may_take_longer_and_an_observer_may_judge_later() -> None:
    bench = Bench(1, first_s=20.0, later_s=5.0)
    bench.silent.add(0)
    assert not bench.look(34) and bench.look(2)


def test_what_a_rank_does_is_told_from_the_widest_stretch_to_the_innermost() -> None:
    activity = Activity()
    before = activity.look().beats
    with activity.doing("step 3"), activity.doing("send scorer, step 3", waits=True):
        assert activity.look().what == "step 3, send scorer, step 3" and activity.look().waits
        with activity.doing("reward of sequence 7"):
            assert not activity.look().waits
        with activity.doing("round 2"):
            activity.now_at("recv chunk actor m0 c2 <- 0", True)
            assert activity.look().what.endswith("step 3, recv chunk actor m0 c2 <- 0") and activity.look().waits
    assert activity.look().what == "nothing that it has named" and activity.look().beats > before


def test_who_waits_for_a_thread_of_its_own_is_at_what_the_thread_is_at() -> None:
    """A checkpoint that is written beside the run."""
    clock = Clock()
    run, thread = Activity(clock), Activity(clock)
    with run.doing("checkpoint step-000002"), run.doing(thread):
        with thread.doing("models"):
            before = run.look()
            assert before.what == "checkpoint step-000002, models" and not before.waits
        with thread.doing("models of all ranks", waits=True):
            assert run.look().waits and run.look().beats > before.beats
            clock.now += 5
            assert run.look().still_s == 5


@pytest.fixture
def store() -> dist.TCPStore:
    return loopback_store(0, timedelta(seconds=20))


def connection(store: dist.TCPStore) -> dist.Store:
    timeout = timedelta(seconds=5)
    return dist.TCPStore("127.0.0.1", store.port, None, False, timeout, wait_for_workers=False)


HUNG = """
import sys, time
from datetime import timedelta
from oppo_megatron.cluster.rendezvous import loopback_store
store = loopback_store(0, timedelta(seconds=20))
print(store.port, flush=True)
time.sleep(100)
"""


def test_a_store_whose_process_is_stopped_keeps_nobody(tmp_path: Path) -> None:
    keeper = subprocess.Popen([sys.executable, "-c", HUNG], stdout=subprocess.PIPE, text=True)
    try:
        assert keeper.stdout is not None
        port = int(keeper.stdout.readline())
        timeout = timedelta(seconds=5)
        board = Board(lambda: dist.TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False), range(2), "rank 0")
        mine = Note(1, 1, 1, "work", False, 0.0)
        assert board.exchange(mine, 20.0) == [mine]
        os.kill(keeper.pid, signal.SIGSTOP)
        os.waitpid(keeper.pid, os.WUNTRACED)  # all its threads have stopped
        assert [board.exchange(mine, 0.1) for _ in range(3)] == [None] * 3
        os.kill(keeper.pid, signal.SIGCONT)
        until = time.monotonic() + 60
        while board.exchange(mine, 0.5) is None:
            assert time.monotonic() < until
    finally:
        keeper.kill()
        keeper.wait()


def hold_the_interpreter(board: Board, folder: Path) -> None:
    """A rank whose main thread is in a call that lets no other thread run, from some notes on."""
    set_timer, timers = faulthandler.dump_traceback_later, threading.Semaphore(0)

    def noted(*args: Any, **options: Any) -> None:
        set_timer(*args, **options)
        timers.release()

    faulthandler.dump_traceback_later = noted  # in this process alone
    watch = Watch(range(2), 1.0, time.monotonic)
    with Watchdog(0, watch, Activity(), board, folder / "stacks", lambda _: os._exit(77)).watching():
        for _ in range(2):
            timers.acquire()
        ctypes.PyDLL(None).sleep(60)  # unlike CDLL it keeps the interpreter


def test_a_rank_whose_interpreter_is_held_is_ended_by_its_timer(
    store: dist.TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "ANSWER_S", 0.3)
    monkeypatch.setattr(watchdog_module, "READ_S", 0.3)
    board = Board(lambda: connection(store), range(2), "this test")
    rank = multiprocessing.get_context("fork").Process(target=hold_the_interpreter, args=(board, tmp_path))
    rank.start()
    rank.join(60)
    rank.kill()
    # 1 is faulthandler's own; another thread of the fork that meets the end first may make it an abort.  -9 would be ours.
    assert rank.exitcode in (1, -signal.SIGABRT), "as faulthandler ends a process"
    stacks = (tmp_path / "stacks" / "rank-0.txt").read_text()
    assert stacks.startswith("Timeout (0:00:02") and "in hold_the_interpreter" in stacks
