"""A rank's watchdog: ends the rank if the run stands still.

A thread writes the rank's note to the store where the ranks have met, and reads those of the others, several times within
`stall_deadline_s`.  If the run has stalled (`stalls.py`), every watchdog writes the stacks of all threads of its process to
`stacks/rank-N.txt`, says so in its note, waits for the notes of the others, and ends its process: the main thread may be in a
call that nothing can interrupt.

A call that holds the interpreter stops the watchdog, too.  Then a timer of `faulthandler`, which needs no interpreter, writes
the stacks and ends the process; the watchdog restarts this timer with each note.
"""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.liveness.stalls import Note, Watch
from oppo_megatron.cluster.rendezvous import MeetingPoint

LONGEST_TICK_S = 5.0
ANSWER_S = 2.0  # for a rank that hears of a stall to write its stacks and to answer, beside two ticks
TOLD_S = 2.0  # for the others to make up their messages: the store may end with this process


def tick_s(deadline_s: float) -> float:
    """Seconds between two notes."""
    return min(LONGEST_TICK_S, max(0.1, deadline_s / 20))


def told_within_s(deadline_s: float) -> float:
    """Seconds beyond the deadline within which the running watchdogs have reported the stall and end."""
    return 4 * tick_s(deadline_s) + ANSWER_S + TOLD_S + 0.5


class Board:
    """The notes of all ranks, in a store.  `connect` opens a connection of its own to it.

    A call to a store whose process is stopped never returns: calls are made by a thread that may be left behind.
    """

    def __init__(self, connect: Callable[[], dist.Store], ranks: Sequence[int], keeper: str):
        self.keeper = keeper
        self._connect, self._ranks = connect, list(ranks)
        self._store: dist.Store | None = None
        self._known: set[int] = set()
        self._call: threading.Thread | None = None
        self._found: list[Note] | None = None

    def exchange(self, mine: Note | None, within_s: float) -> list[Note] | None:
        """Put down a note, and read all; None where the store does not answer in time."""
        if self._call is None or not self._call.is_alive():
            self._found = None
            self._call = threading.Thread(target=self._exchange, args=(mine,), name="stall notes", daemon=True)
            self._call.start()
            self._call.join(within_s)
            if not self._call.is_alive():
                return self._found
        else:
            self._call.join(within_s)
        return None

    def _exchange(self, mine: Note | None) -> None:
        with suppress(RuntimeError, ValueError):  # the store has ended, or the value is no note
            if self._store is None:
                self._store = self._connect()
            store = self._store
            if mine is not None:
                store.set(str(mine.rank), mine.encode())
                self._known.add(mine.rank)
            new = [rank for rank in self._ranks if rank not in self._known and store.check([str(rank)])]
            self._known.update(new)
            keys = [str(rank) for rank in sorted(self._known)]
            self._found = [Note.decode(text) for text in store.multi_get(keys)] if keys else []


def board_of(point: MeetingPoint) -> Board:
    """The board of the ranks that meet at a point; for them, and for who has started them."""

    def connect() -> dist.Store:
        address = "localhost" if point.opens and not point.address.startswith("127.") else point.address
        timeout = timedelta(seconds=LONGEST_TICK_S)
        store = dist.TCPStore(address, point.port, None, False, timeout, wait_for_workers=False)
        return dist.PrefixStore(f"{point.name}/stalls", store)

    return Board(connect, range(point.size), point.opener)


class Watchdog:
    """One rank's watchdog.  `board` is None for a single rank; `end` takes the message of the stall and does not return."""

    def __init__(
        self,
        rank: int,
        watch: Watch,
        activity: Activity,
        board: Board | None,
        folder: Path,
        end: Callable[[str], None],
    ):
        self.rank, self.watch, self.activity, self.board, self.folder = rank, watch, activity, board, folder
        self._end, self._tick_s, self._number = end, tick_s(watch.deadline_s), 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall watchdog", daemon=True)
        self._spare: IO[Any] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs."""
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
                self._wind_up(self.watch.deadline_s + told_within_s(self.watch.deadline_s))
                self._look(self._note())
                if self.watch.alarmed or self.watch.stalled(self.rank):
                    self._alarm()
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _note(self) -> Note:
        self._number += 1
        return Note.of(self.rank, self._number, self.activity.look())

    def _look(self, mine: Note) -> None:
        """Put the note down, and take in all others'."""
        found = None if self.board is None else self.board.exchange(mine, self._tick_s)
        others = [note for note in found or [] if note.rank != self.rank]
        self.watch.observe([mine, *others], reaches_others=self.board is None or found is not None)

    def _alarm(self) -> None:
        """Stacks, notes of the others, the message, and the end."""
        mine = replace(self._note(), alarm=True)
        self._write_stacks(mine)
        self._wind_up(2 * self._tick_s + 2 * ANSWER_S + TOLD_S)
        self._look(mine)
        self._until(2 * self._tick_s + ANSWER_S, mine, lambda note: note.alarm)
        answered = {self.rank, *self.watch.alarmed}
        keeper = "this rank" if self.board is None else self.board.keeper
        message = f"{self.watch.describe(self.rank, answered, keeper)}; stacks of all threads are in {self.folder}"
        told = replace(mine, told=True)
        self._look(told)
        self._until(TOLD_S, told, lambda note: note.told or note.rank not in answered)
        self._end(message)

    def _until(self, seconds: float, mine: Note, done: Callable[[Note], bool]) -> None:
        """Look until all live ranks' notes are `done`, or the time is over."""
        until, watch = time.monotonic() + seconds, self.watch
        while time.monotonic() < until:
            if len(watch.live) == sum(done(watch.notes[rank]) for rank in watch.live if rank in watch.notes):
                return
            time.sleep(min(0.1, self._tick_s))
            self._number += 1
            mine = replace(mine, number=self._number)
            self._look(mine)

    def _wind_up(self, seconds: float) -> None:
        """Should this thread not come back in time, the process ends by a timer that needs no interpreter."""
        with suppress(OSError, ValueError, RuntimeError):  # the folder cannot be written, or this process has no stderr
            if self._spare is None and self.board is not None and self.folder.parent.is_dir():
                self.folder.mkdir(exist_ok=True)
                self._spare = self._file.open("a", encoding="utf-8")
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._spare or sys.stderr)

    @property
    def _file(self) -> Path:
        return self.folder / f"rank-{self.rank}.txt"

    def _write_stacks(self, note: Note) -> None:
        """Of all threads of this process; the file system may be what does not answer."""
        faulthandler.cancel_dump_traceback_later()
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        text = f"{datetime.now():%F %T} rank {self.rank}, for {note.still_s:.0f} s: {note.what}\n{stacks}\n"
        writer = threading.Thread(target=self._append, args=(text,), daemon=True)
        writer.start()
        writer.join(ANSWER_S)

    def _append(self, text: str) -> None:
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(text)
