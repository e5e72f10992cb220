"""Watchdogs in circles: a rank that stands still is named by all, and what each reads does not grow with the run."""

from __future__ import annotations

import faulthandler
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.liveness import watchdog as watchdog_module
from oppo_megatron.cluster.liveness.board import Board
from oppo_megatron.cluster.liveness.circles import Circles
from oppo_megatron.cluster.liveness.stalls import Note, Watch
from oppo_megatron.cluster.liveness.summaries import Summaries
from oppo_megatron.cluster.liveness.watchdog import Watchdog, told_within_s
from oppo_megatron.cluster.loopback import loopback_store

DEADLINE_S = 1.0
LOOK_S = 0.2  # so much of the time between two looks counts: a process that stood still as a whole is not alarmed by it
CIRCLES = Circles(7, most=3)  # 0-2, 3-5, 6


@pytest.mark.parametrize("size", [1, 8, 32, 33, 128, 1024, 4096, 16384])
def test_circles_divide_the_ranks_and_a_rank_reads_few_notes(size: int) -> None:
    circles = Circles(size)
    assert [rank for number in range(circles.count) for rank in circles.members(number)] == list(range(size))
    assert all(rank in circles.members(circles.number(rank)) for rank in range(size))
    assert all(circles.notes_read(rank, speaks=False) <= 32 for rank in range(size))
    reads = sum(circles.notes_read(rank, speaks=rank % circles.most == 0) for rank in range(size))
    assert reads <= 48 * size, "together, of one store"


class Counted:
    """A connection to a store that counts the notes read over it."""

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
        self.activities = [Activity() for _ in range(CIRCLES.size)]

    def board(self, rank: int, name: str, numbers: Sequence[int]) -> Board:
        def connect() -> Any:
            timeout = timedelta(seconds=5)
            store = dist.TCPStore("127.0.0.1", self.store.port, None, False, timeout, wait_for_workers=False)
            return Counted(dist.PrefixStore(name, store), self.reads, rank)

        return Board(connect, numbers, "this test")

    def watchdog(self, rank: int) -> Watchdog:
        number = CIRCLES.number(rank)
        near = Watch(CIRCLES.members(number), DEADLINE_S, LOOK_S, time.monotonic, whole=False)
        others = Watch(range(CIRCLES.count), DEADLINE_S, LOOK_S, time.monotonic)
        far = Summaries(CIRCLES, number, self.board(rank, "circles", range(CIRCLES.count)), others)
        notes = self.board(rank, "notes", CIRCLES.members(number))

        def end(message: str) -> None:
            self.told[rank] = message

        return Watchdog(rank, near, self.activities[rank], notes, self.folder, end, far)

    @contextmanager
    def watching(self, ranks: Sequence[int]) -> Iterator[None]:
        with ExitStack() as block:
            for rank in ranks:
                block.enter_context(self.watchdog(rank).watching())
            yield

    def beat(self, ranks: Sequence[int], until: Callable[[], bool], seconds: float) -> None:
        """These ranks move until then, but for so many seconds at most."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            for rank in ranks:
                with self.activities[rank].doing("step 5"):
                    time.sleep(0.01)

    def ended(self, ranks: Sequence[int], seconds: float | None = None) -> None:
        limit_s = DEADLINE_S + told_within_s(DEADLINE_S, CIRCLES.count) if seconds is None else seconds
        self.beat((), lambda: set(ranks) <= set(self.told), limit_s + 5.0)
        assert sorted(self.told) == list(ranks)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(watchdog_module, "ANSWER_S", 30.0)  # on a busy machine; who has all answers goes on
    monkeypatch.setattr(watchdog_module, "TOLD_S", 0.5)
    # A process has one such timer, which its one watchdog restarts; here it would be set by seven, and end the tests.
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *args, **kwargs: None)
    return Run(tmp_path)


def test_a_rank_that_stands_is_named_by_all_circles(run: Run) -> None:
    """Others wait for it, and some move."""
    ranks = range(CIRCLES.size)
    with ExitStack() as block:
        for rank in (0, 1, 3, 5):
            block.enter_context(run.activities[rank].doing(f"step 5, recv {rank}", waits=True))
        block.enter_context(run.activities[4].doing("step 5, reward of sequence 9"))
        with run.watching(ranks):
            run.beat((2, 6), lambda: set(ranks) <= set(run.told), 120.0)
    for rank in ranks:
        head, _, others = run.told[rank].partition("; ")
        assert "the run stands still (" in head and "rank 4 has not moved for" in head, run.told[rank]
        assert "reward of sequence 9" in head and "nobody answered" not in others
        assert sum(f"rank {other} " in run.told[rank] for other in CIRCLES.members(CIRCLES.number(rank))) == len(
            CIRCLES.members(CIRCLES.number(rank))
        ), "the rest of a rank's own circle follows"
        assert (run.folder / f"rank-{rank}.txt").exists()
    assert all(run.reads[rank] <= 3 for rank in ranks)


def test_a_speaker_that_falls_silent_is_named_by_all_circles(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its circle has another speaker then."""
    monkeypatch.setattr(watchdog_module, "ANSWER_S", 4.0)  # for which all wait here
    others = [rank for rank in range(CIRCLES.size) if rank != 3]
    run.board(3, "notes", [3]).exchange(Note(3, 1, 1, "step 5, prefill critic", False, 0.0), 5.0)
    with run.watching(others):
        run.beat(others, lambda: set(others) <= set(run.told), 120.0)
    assert all("rank 3 did not answer" in run.told[rank] and "step 5, prefill critic" in run.told[rank] for rank in others)


def test_circles_that_wait_for_one_that_moves_have_not_stalled_and_together_they_may(run: Run) -> None:
    with ExitStack() as block:
        for rank in range(CIRCLES.size - 1):
            block.enter_context(run.activities[rank].doing("step 5, recv", waits=True))
        with run.watching(range(CIRCLES.size)):
            run.beat((6,), lambda: bool(run.told), 3 * DEADLINE_S)
            assert not run.told
            block.enter_context(run.activities[6].doing("step 5, recv", waits=True))
            run.ended(range(CIRCLES.size))
    assert all("for its ranks wait for each other (" in message for message in run.told.values())


def test_a_circle_that_has_ended_is_missed_by_nobody(run: Run) -> None:
    with run.watching([0, 1, 2, 6]):
        with run.watching([3, 4, 5]):
            run.beat(range(CIRCLES.size), lambda: bool(run.told), DEADLINE_S)
        run.beat((0, 1, 2, 6), lambda: bool(run.told), 3 * DEADLINE_S)
        assert not run.told
