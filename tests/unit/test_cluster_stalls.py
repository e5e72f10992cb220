"""A rank that stalls is named, on a clock that only the test moves and by watchdogs over a real store."""

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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.liveness import watchdog as watchdog_module
from oppo_megatron.cluster.liveness.stalls import MOST_STATES, Board, Note, Watch
from oppo_megatron.cluster.liveness.watchdog import JUDGE, Watchdog, verdict_within_s
from oppo_megatron.cluster.rendezvous import loopback_store
from tests.support.processes import wait_for


class Bench:
    def __init__(self, size: int, **options: float):
        self.now, self.beats, self.number = 100.0, [0] * size, 0
        self.waits, self.silent, self.what = [False] * size, set[int](), ["work"] * size
        self.watch = Watch(range(size), 10.0, lambda: self.now, **options)

    def look(self, seconds: int, moving: tuple[int, ...] = (), reaches: bool = True) -> bool:
        """So many seconds pass, in which these ranks move; whether the run has stalled."""
        for _ in range(seconds):
            self.now, self.number = self.now + 1, self.number + 1
            for rank in moving:
                self.beats[rank] += 1
            told = [self.note(rank) for rank in range(len(self.beats)) if rank not in self.silent]
            self.watch.observe(told if reaches else told[:1], reaches_others=reaches)
        return self.watch.stalled(0)

    def note(self, rank: int) -> Note:
        return Note(rank, self.number, self.beats[rank], self.what[rank], self.waits[rank], self.watch.still_s(rank))


def test_a_rank_that_works_must_move_one_that_waits_may_wait_for_one_that_moves_but_not_all_for_each_other() -> None:
    bench = Bench(2)
    bench.waits[0] = True
    assert not bench.look(60, moving=(1,)), "rank 0 waits for one that is slow"
    assert not bench.look(9)
    assert bench.look(2), "rank 1 does not move"
    bench.what[1] = "reward of sequence 3"
    bench.look(1)
    assert bench.watch.describe(0, [0, 1], "rank 0") == (
        "the run has stalled (stall_deadline_s is 10): rank 1 has not moved for 11 s: reward of sequence 3; "
        "rank 0 waited 70 s in vain: work"
    )
    bench = Bench(3)  # a rank that works and does not move stalls a run in which others move
    assert not bench.look(9, moving=(1, 2)) and bench.look(2, moving=(1, 2))
    bench = Bench(2)
    bench.waits = [True, True]
    assert not bench.look(9) and bench.look(2)
    assert "because its ranks wait for each other (" in bench.watch.describe(0, [0, 1], "rank 0")


def test_a_silent_rank_is_named_with_its_last_words_and_without_an_answer_a_rank_judges_itself_alone() -> None:
    bench = Bench(3)
    bench.what[2] = "step 3, decode actor m0 c12 s2"
    bench.look(3, moving=(0, 1, 2))
    bench.silent.add(2)
    assert not bench.look(9, moving=(0, 1)) and bench.look(2, moving=(0, 1))
    told = bench.watch.describe(0, [0, 1], "rank 0")
    assert told.startswith("the run has stalled (stall_deadline_s is 10): rank 2 did not answer")
    assert "it last said, 11 s ago: step 3, decode actor m0 c12 s2; rank 0 has not moved for 0 s: work" in told
    watch = Watch(range(4096), 10.0, time.monotonic)
    watch.observe(Note(rank, 1, 1, "step 5, recv", True, 9.0) for rank in range(4096) if rank != 4000)
    told = watch.describe(0, [rank for rank in range(4096) if rank != 4000], "rank 0")
    assert "rank 4000 did not answer" in told and told.count(";") == MOST_STATES and told.endswith("and 4064 other ranks")
    bench = Bench(3)
    bench.waits[0] = True
    bench.look(2, moving=(0, 1, 2))
    assert not bench.look(60, moving=(0,), reaches=False), "it moves: nothing is wrong with it"
    assert not bench.look(9, reaches=False) and bench.look(2, reaches=False)
    told = bench.watch.describe(0, [0], "rank 2")
    assert "kept by rank 2, has not answered for" in told and "rank 0 waited" in told
    assert not Bench(2).look(9, reaches=False)


def test_the_first_note_may_take_longer_an_observer_may_judge_later_and_time_without_it_is_not_held_against_anyone() -> None:
    bench = Bench(1, first_s=20.0, later_s=5.0)
    bench.silent.add(0)
    assert not bench.look(34) and bench.look(2)
    bench = Bench(2)
    bench.look(2, moving=(0, 1))
    bench.now += 3600
    assert not bench.look(5, moving=(0, 1))


def test_what_a_rank_does_is_told_from_the_widest_stretch_to_the_innermost_also_in_a_thread_that_it_waits_for() -> None:
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
    clock = Bench(1)
    run, thread = (Activity(lambda: clock.now) for _ in range(2))
    with run.doing("checkpoint step-000002"), run.doing(thread):
        with thread.doing("models"):
            before = run.look()
            assert before.what == "checkpoint step-000002, models" and not before.waits
        with thread.doing("models of all ranks", waits=True):
            assert run.look().waits and run.look().beats > before.beats
            clock.now += 5
            assert run.look().still_s == 5


def connection(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False)


HUNG = """
import sys, time
from datetime import timedelta
from oppo_megatron.cluster.rendezvous import loopback_store
store = loopback_store(0, timedelta(seconds=20))
print(store.port, flush=True)
time.sleep(100)
"""


def test_a_store_whose_process_is_stopped_keeps_nobody() -> None:
    keeper = subprocess.Popen([sys.executable, "-c", HUNG], stdout=subprocess.PIPE, text=True)
    try:
        assert keeper.stdout is not None
        port, mine = int(keeper.stdout.readline()), Note(1, 1, 1, "work", False, 0.0)
        board = Board(lambda: connection(port), range(2), "rank 0")
        assert board.exchange(mine, 20.0) == [mine]
        os.kill(keeper.pid, signal.SIGSTOP)
        os.waitpid(keeper.pid, os.WUNTRACED)  # all its threads have stopped
        assert [board.exchange(mine, 0.1) for _ in range(3)] == [None] * 3
        os.kill(keeper.pid, signal.SIGCONT)
        wait_for(lambda: board.exchange(mine, 0.5) is not None)
    finally:
        keeper.kill()
        keeper.wait()


def hold_the_interpreter(board: Board, folder: Path) -> None:
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


def test_a_rank_whose_interpreter_is_held_is_ended_by_its_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "ANSWER_S", 0.3)
    monkeypatch.setattr(watchdog_module, "READ_S", 0.3)
    store = loopback_store(0, timedelta(seconds=20))
    board = Board(lambda: connection(store.port), range(2), "this test")
    rank = multiprocessing.get_context("fork").Process(target=hold_the_interpreter, args=(board, tmp_path))
    rank.start()
    rank.join(60)
    rank.kill()
    # 1 is faulthandler's own; another thread of the fork that meets the end first may make it an abort.  -9 would be ours.
    assert rank.exitcode in (1, -signal.SIGABRT), "as faulthandler ends a process"
    stacks = (tmp_path / "stacks" / "rank-0.txt").read_text()
    assert stacks.startswith("Timeout (0:00:02") and "in hold_the_interpreter" in stacks


DEADLINE_S = 1.0
SIZE = 5


class Counted:
    def __init__(self, store: dist.Store, reads: Counter[int], rank: int):
        self.store, self.reads, self.rank = store, reads, rank

    def multi_get(self, keys: Sequence[str]) -> Any:
        self.reads[self.rank] = max(self.reads[self.rank], len(keys))
        return self.store.multi_get(list(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Run:
    """The watchdogs of a run in one process.  `told`: each rank's message; `reads`: the most notes that it read at once."""

    def __init__(self, folder: Path):
        self.store = loopback_store(0, timedelta(seconds=20))
        self.folder, self.told, self.reads = folder / "stacks", dict[int, str](), Counter[int]()
        self.activities = [Activity() for _ in range(SIZE)]

    def board(self, rank: int, ranks: Sequence[int]) -> Board:
        return Board(lambda: Counted(connection(self.store.port), self.reads, rank), ranks, "this test")

    def watchdog(self, rank: int) -> Watchdog:
        ranks, end = range(SIZE) if rank == JUDGE else (JUDGE, rank), partial(self.told.__setitem__, rank)
        watch = Watch(ranks, DEADLINE_S, time.monotonic, whole=rank == JUDGE)
        return Watchdog(rank, watch, self.activities[rank], self.board(rank, ranks), self.folder, end, SIZE)

    @contextmanager
    def watching(self, ranks: Sequence[int]) -> Iterator[None]:
        with ExitStack() as block:
            for rank in ranks:
                block.enter_context(self.watchdog(rank).watching())
            yield

    def beat(self, ranks: Sequence[int], until: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            for rank in ranks:
                with self.activities[rank].doing("step 5"):
                    time.sleep(0.01)
            time.sleep(0.01)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(watchdog_module, "ANSWER_S", 30.0)  # on a busy machine; who has all answers goes on
    monkeypatch.setattr(watchdog_module, "READ_S", 10.0)
    # A process has one such timer, which its one watchdog restarts; here several would set it, and it would end the tests.
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *args, **kwargs: None)
    return Run(tmp_path)


def test_all_ranks_name_a_rank_that_stands_and_only_the_judge_reads_all_notes(run: Run) -> None:
    ranks = range(SIZE)
    with ExitStack() as block:
        for rank in (0, 1):
            block.enter_context(run.activities[rank].doing(f"step 5, recv {rank}", waits=True))
        block.enter_context(run.activities[3].doing("step 5, reward of sequence 9"))
        with run.watching(ranks):
            run.beat((2, 4), lambda: set(ranks) <= set(run.told), 120.0)
    assert len(set(run.told.values())) == 1 and sorted(run.told) == list(ranks), run.told
    head, _, others = run.told[0].partition("; ")
    assert "the run has stalled (" in head and "rank 3 has not moved for" in head and "reward of sequence 9" in head
    assert all(f"rank {rank} " in others for rank in ranks if rank != 3)
    assert all((run.folder / f"rank-{rank}.txt").exists() for rank in ranks)
    assert run.reads[JUDGE] == SIZE and all(run.reads[rank] <= 2 for rank in ranks if rank != JUDGE)


def test_all_ranks_name_a_silent_judge(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "ANSWER_S", 2.0)  # for which all wait here
    others = range(1, SIZE)
    run.board(0, [0]).exchange(Note(0, 1, 1, "step 5, prefill critic", False, 0.0), 5.0)
    with run.watching(others):
        run.beat(others, lambda: set(others) <= set(run.told), 120.0)
    assert all("rank 0 did not answer" in run.told[rank] and "step 5, prefill critic" in run.told[rank] for rank in others)


def test_ranks_that_wait_for_one_that_moves_have_not_stalled_and_together_they_may(run: Run) -> None:
    with ExitStack() as block:
        for rank in range(SIZE - 1):
            block.enter_context(run.activities[rank].doing("step 5, recv", waits=True))
        with run.watching(range(SIZE)):
            run.beat((SIZE - 1,), lambda: bool(run.told), 3 * DEADLINE_S)
            assert not run.told
            block.enter_context(run.activities[SIZE - 1].doing("step 5, recv", waits=True))
            run.beat((), lambda: len(run.told) == SIZE, DEADLINE_S + verdict_within_s(DEADLINE_S))
    assert len(run.told) == SIZE
    assert all("because its ranks wait for each other (" in message for message in run.told.values())


def test_ranks_that_have_ended_are_missed_by_nobody(run: Run) -> None:
    with run.watching([1, 2]):
        with run.watching([0, 3, 4]):
            run.beat(range(SIZE), lambda: bool(run.told), DEADLINE_S)
        run.beat((1, 2), lambda: bool(run.told), 3 * DEADLINE_S)
        assert not run.told
