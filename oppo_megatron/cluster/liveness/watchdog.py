"""A rank's watchdog: ends the rank if the run stands still.

A thread writes the rank's note to the store where the ranks have met, and reads those of its circle, several times within
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.liveness.board import Board, tick_s
from oppo_megatron.cluster.liveness.stalls import Note, Watch
from oppo_megatron.cluster.liveness.summaries import Summaries, speaker

ANSWER_S = 2.0  # for a rank that hears of a stall to write its stacks and to answer, beside two ticks
LOOK_S = 1e-4  # what the store takes for a look of one rank, for its circle's notes: so often do ranks look in an alarm
TOLD_S = 2.0  # for the others to make up their messages: the store may end with this process


def told_within_s(deadline_s: float, circles: int = 1) -> float:
    """Seconds beyond the deadline within which the running watchdogs have reported the stall and end.

    Of several circles each hears of the others' ranks by two speakers.
    """
    one = 4 * tick_s(deadline_s) + ANSWER_S + TOLD_S + 0.5
    return one if circles == 1 else one + _elsewhere_s(deadline_s)


def _elsewhere_s(deadline_s: float) -> float:
    """How long a circle waits for the others' words once its own ranks have answered."""
    return 4 * tick_s(deadline_s) + 2 * ANSWER_S + TOLD_S  # one with a silent rank takes half of it to say so


class Watchdog:
    """One rank's watchdog.  `board` is None for a single rank; `end` takes the message of the stall and does not return.

    `watch` and `board` are of the rank's circle; `far`: of the other circles, where there are any.
    """

    def __init__(
        self,
        rank: int,
        watch: Watch,
        activity: Activity,
        board: Board | None,
        folder: Path,
        end: Callable[[str], None],
        far: Summaries | None = None,
    ):
        self.rank, self.watch, self.activity, self.board, self.folder, self.far = (
            rank, watch, activity, board, folder, far,
        )  # fmt: skip
        self._answered: set[int] | None = None
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
                self._leave(replace(self._note(), ended=True))

    def _run(self) -> None:
        try:
            while not self._over.wait(self._tick_s):
                self._wind_up(self.watch.deadline_s + self._told_within_s)
                self._look(self._note())
                if self.watch.alarmed or self.watch.stalled(self.rank) or self._others_stalled:
                    self._alarm()
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _note(self) -> Note:
        self._number += 1
        return Note.of(self.rank, self._number, self.activity.look())

    @property
    def _told_within_s(self) -> float:
        return told_within_s(self.watch.deadline_s, 1 if self.far is None else self.far.circles.count)

    @property
    def _others_stalled(self) -> bool:
        return self.far is not None and self._spoken_by == self.rank and self.far.stalled

    @property
    def _spoken_by(self) -> int | None:
        return speaker(self.watch, self._answered)

    def _look(self, mine: Note) -> None:
        """Put the note down, and take in those of the circle; as its speaker, those of all circles."""
        found = None if self.board is None else self.board.exchange(mine, self._tick_s)
        others = [note for note in found or [] if note.rank != self.rank]
        self.watch.observe([mine, *others], reaches_others=self.board is None or found is not None)
        if self.far is not None and self._spoken_by == self.rank:
            self.far.exchange(self.watch, self._tick_s)

    def _leave(self, last: Note) -> None:
        """The last to leave a circle says so for it: of two that leave at once, the later finds the other's note."""
        assert self.board is not None
        found = self.board.exchange(last, ANSWER_S)
        if found is not None and self.far is not None:
            self.watch.observe(found)
            if not self.watch.live:
                self.far.exchange(self.watch, ANSWER_S)

    def _alarm(self) -> None:
        """Stacks, notes of the others, the message, and the end."""
        mine = replace(self._note(), alarm=True)
        self._write_stacks(mine)
        beyond_s = 0.0 if self.far is None else _elsewhere_s(self.watch.deadline_s)
        self._wind_up(2 * self._tick_s + 2 * ANSWER_S + TOLD_S + beyond_s)
        self._look(mine)
        self._until(2 * self._tick_s + ANSWER_S, mine, lambda: self._all(lambda note: note.alarm))
        answered = self._answered = {self.rank, *self.watch.alarmed}
        elsewhere = self._words_from_elsewhere(mine)
        keeper = "this rank" if self.board is None else self.board.keeper
        message = f"{self.watch.describe(self.rank, answered, keeper, elsewhere)}; stacks of all threads are in {self.folder}"
        told = replace(mine, told=True, elsewhere=elsewhere)
        self._look(told)
        stays = self.far is not None and self._spoken_by == self.rank  # the store may be here, and other circles still read
        self._until(TOLD_S, told, lambda: not stays and self._all(lambda note: note.told or note.rank not in answered))
        self._end(message)

    def _words_from_elsewhere(self, mine: Note) -> str:
        """Which ranks of other circles stand still: asked by the speaker, and passed on in its note."""
        far, spoken_by, assured_s = self.far, self._spoken_by, _elsewhere_s(self.watch.deadline_s)
        if far is None or self.watch.alone_s >= self.watch.deadline_s:
            return ""
        if spoken_by == self.rank:
            far.say(self.watch.describe_standing(self._answered or ()))
            self._until(assured_s - TOLD_S, mine, lambda: far.told)
            return far.elsewhere()
        notes = self.watch.notes
        self._until(assured_s, mine, lambda: spoken_by in notes and notes[spoken_by].told)
        return notes[spoken_by].elsewhere if spoken_by in notes else ""

    def _all(self, done: Callable[[Note], bool]) -> bool:
        """Whether the notes of all live ranks of the circle are `done`."""
        watch = self.watch
        return len(watch.live) == sum(done(watch.notes[rank]) for rank in watch.live if rank in watch.notes)

    def _until(self, seconds: float, mine: Note, done: Callable[[], bool]) -> None:
        """Look until it is `done`, or the time is over."""
        until, size = time.monotonic() + seconds, 1 if self.far is None else self.far.circles.size
        while time.monotonic() < until and not done():
            time.sleep(min(max(0.1, LOOK_S * size), self._tick_s))
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
