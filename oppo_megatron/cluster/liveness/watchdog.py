"""Ends a rank if the run has stalled.

A thread writes notes to the store of the rendezvous. Rank 0 (the judge) reads all, others only the judge's: a load linear in
ranks. In a stall each watchdog writes `stacks/rank-N.txt` and ends its process with the judge's verdict; if a call holds the
interpreter, a timer of `faulthandler`, restarted with each note, does so.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.liveness.failures import end_stalled
from oppo_megatron.cluster.liveness.stalls import Board, Note, Watch, board_at, tick_s
from oppo_megatron.cluster.rendezvous import MeetingPoint
from oppo_megatron.cluster.world import World
from oppo_megatron.rundir.directory import RunDirectory

JUDGE = 0
ANSWER_S = 2.0  # for a rank that reads of a stall to write its stacks and a note, in addition to two ticks
READ_S = 2.0  # for the others to read the verdict: the store may end with this process
LOOK_S = 1e-4  # the store's time for a look of one rank: with many ranks each looks less often


def verdict_within_s(deadline_s: float) -> float:
    """Seconds after the deadline until running watchdogs have ended their ranks."""
    return 4 * tick_s(deadline_s) + ANSWER_S + READ_S + 0.5


class Watchdog:
    """`end` does not return. `watch` and `board`: of all ranks (judge), or of the judge and this one."""

    def __init__(
        self, rank: int, watch: Watch, activity: Activity, board: Board | None, folder: Path, end: Callable[[str], None],
        size: int = 1,
    ):  # fmt: skip
        self.rank, self.watch, self.activity, self.board = rank, watch, activity, board
        self.folder, self._file = folder, folder / f"rank-{rank}.txt"
        self._end, self._tick_s, self._number = end, tick_s(watch.deadline_s), 0
        self._pause_s = min(max(0.1, LOOK_S * size), self._tick_s)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall watchdog", daemon=True)
        self._spare: IO[Any] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join(3 * self._tick_s)
            if self.board is not None:
                self.board.exchange(replace(self._note(), ended=True), ANSWER_S)

    def _run(self) -> None:
        try:
            while not self._over.wait(self._tick_s):
                self._wind_up(self.watch.deadline_s + verdict_within_s(self.watch.deadline_s))
                self._look(self._note())
                if self.watch.alarmed or self.watch.stalled(self.rank):
                    self._alarm()
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _note(self) -> Note:
        self._number += 1
        return Note(self.rank, self._number, **asdict(self.activity.look()))

    def _look(self, mine: Note) -> None:
        found = None if self.board is None else self.board.exchange(mine, self._tick_s)
        others = [note for note in found or [] if note.rank != self.rank]
        self.watch.observe([mine, *others], reaches_others=self.board is None or found is not None)

    def _alarm(self) -> None:
        watch, mine = self.watch, replace(self._note(), alarm=True)
        self._write_stacks(mine)
        self._wind_up(5 * self._tick_s + 2 * ANSWER_S + READ_S)
        self._look(mine)
        answer_s = 2 * self._tick_s + ANSWER_S
        if self.rank == JUDGE or self.board is None:
            self._until(answer_s, mine, lambda: self._all(lambda note: note.alarm))
        else:
            self._until(answer_s + self._tick_s, mine, lambda: bool(self._verdict))
        answered = {self.rank, *watch.alarmed}
        described = watch.describe(self.rank, answered, "this rank" if self.board is None else self.board.keeper)
        verdict = self._verdict or f"{described}; stacks of all threads are in {self.folder}"
        last = replace(mine, verdict=verdict)
        self._look(last)
        if self.rank == JUDGE:
            self._until(READ_S, last, lambda: self._all(lambda note: bool(note.verdict) or note.rank not in answered))
        self._end(verdict)

    @property
    def _verdict(self) -> str:
        """The judge's verdict; "" on the judge."""
        note = self.watch.notes.get(JUDGE)
        return "" if note is None or self.rank == JUDGE else note.verdict

    def _all(self, done: Callable[[Note], bool]) -> bool:
        watch = self.watch
        return len(watch.live) == sum(done(watch.notes[rank]) for rank in watch.live if rank in watch.notes)

    def _until(self, seconds: float, mine: Note, done: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not done():
            time.sleep(self._pause_s)
            self._number += 1
            mine = replace(mine, number=self._number)
            self._look(mine)

    def _wind_up(self, seconds: float) -> None:
        """Restart the timer that ends the process if this thread hangs."""
        with suppress(OSError, ValueError, RuntimeError):  # the folder cannot be written, or this process has no stderr
            if self._spare is None and self.board is not None and self.folder.parent.is_dir():
                self.folder.mkdir(exist_ok=True)
                self._spare = self._file.open("a", encoding="utf-8")
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._spare or sys.stderr)

    def _write_stacks(self, note: Note) -> None:
        """Write all stacks, from another thread: the file system may hang."""
        faulthandler.cancel_dump_traceback_later()
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        text = f"{datetime.now():%F %T} rank {self.rank}, for {note.still_s:.0f} s: {note.what}\n{stacks}\n"

        def append() -> None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(text)

        writer = threading.Thread(target=append, daemon=True)
        writer.start()
        writer.join(ANSWER_S)


@contextmanager
def watched(
    world: World, deadline_s: float, run_dir: Path, command: str, environment: Mapping[str, str] = os.environ,
    end: Callable[[int, str, str], None] = end_stalled,
) -> Iterator[None]:  # fmt: skip
    """Call `end` (rank, command, message) if the run stalls for `deadline_s` (0: never)."""
    if not deadline_s:
        yield
        return
    rank, size, board = world.rank, world.size, None
    ranks = range(size) if rank == JUDGE else (JUDGE, rank)
    if size > 1 or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        board = board_at(MeetingPoint.from_environment(environment, rank, size), ranks)
    watch = Watch(ranks, deadline_s, time.monotonic, whole=rank == JUDGE)
    folder = RunDirectory(run_dir).stacks
    with Watchdog(rank, watch, world.activity, board, folder, partial(end, rank, command), size).watching():
        yield


def stacks_on_request() -> None:
    """Write all threads' stacks to stderr on SIGUSR2."""
    if hasattr(faulthandler, "register") and sys.__stderr__ is not None:
        with suppress(ValueError, OSError):  # a stderr that is not a file
            faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)
