"""Watchdogs of several ranks over one store: all name the rank that stands still, and only the judge reads all notes."""

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
from oppo_megatron.cluster.liveness.stalls import MOST_STATES, Board, Note, Watch
from oppo_megatron.cluster.liveness.watchdog import JUDGE, Watchdog, verdict_within_s
from oppo_megatron.cluster.rendezvous import loopback_store

DEADLINE_S = 1.0
SIZE = 5


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
        self.activities = [Activity() for _ in range(SIZE)]

    def board(self, rank: int, ranks: Sequence[int]) -> Board:
        def connect() -> Any:
            timeout = timedelta(seconds=5)
            store = dist.TCPStore("127.0.0.1", self.store.port, None, False, timeout, wait_for_workers=False)
            return Counted(store, self.reads, rank)

        return Board(connect, ranks, "this test")

    def watchdog(self, rank: int) -> Watchdog:
        ranks = range(SIZE) if rank == JUDGE else (JUDGE, rank)
        watch = Watch(ranks, DEADLINE_S, time.monotonic, whole=rank == JUDGE)

        def end(message: str) -> None:
            self.told[rank] = message

        return Watchdog(rank, watch, self.activities[rank], self.board(rank, ranks), self.folder, end, SIZE)

    @contextmanager
    def watching(self, ranks: Sequence[int]) -> Iterator[None]:
        with ExitStack() as block:
            for rank in ranks:
                block.enter_context(self.watchdog(rank).watching())
            yield

    def beat(self, ranks: Sequence[int], until: Callable[[], bool], seconds: float) -> None:
        """Have these ranks move until then, for at most `seconds`."""
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
    """Others wait for it, and some move."""
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


def test_a_message_has_the_states_of_few_ranks() -> None:
    watch = Watch(range(4096), 10.0, time.monotonic)
    watch.observe(Note(rank, 1, 1, "step 5, recv", True, 9.0) for rank in range(4096) if rank != 4000)
    told = watch.describe(0, [rank for rank in range(4096) if rank != 4000], "rank 0")
    assert "rank 4000 did not answer" in told and told.count(";") == MOST_STATES and told.endswith("and 4064 other ranks")
