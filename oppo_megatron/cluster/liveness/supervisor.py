"""Ensures, in the process that started the ranks of a host, that all of them end once the run has ended.

a rank was killed or failed        the ranks still there GRACE_S later are killed: they may hang, or be stopped
told to stop, and not saved        the ranks end by themselves; ranks that cannot are killed
the run stands still               the ranks' watchdogs say so and end them; if none of them can, all are killed
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oppo_megatron.cluster.liveness.board import board_of, tick_s
from oppo_megatron.cluster.liveness.circles import Circles
from oppo_megatron.cluster.liveness.failures import Failure
from oppo_megatron.cluster.liveness.stalls import Watch
from oppo_megatron.cluster.liveness.watchdog import told_within_s
from oppo_megatron.cluster.rendezvous import MeetingPoint
from oppo_megatron.errors import EXIT_AGAIN, EXIT_REQUEUE

GOOD_ENDS = (None, 0, EXIT_REQUEUE, EXIT_AGAIN)
POLL_S = 0.2
GRACE_S = 8.0


@dataclass(frozen=True)
class Limits:
    """stall_s: 0 for none.  told_s: how long ranks that were told to stop may take, None for ever.  first_s: until they meet."""

    stall_s: float
    told_s: float | None
    first_s: float

    @classmethod
    def of(cls, config: Any) -> Limits:
        """Of a command's configuration; one without such settings has no limits."""
        stall_s, told_s = getattr(config, "stall_deadline_s", None), getattr(config, "preempt_deadline_s", None) or None
        if stall_s is None:
            return cls(0.0, told_s, 0.0)
        return cls(stall_s, told_s, config.runtime.meeting_s)


class Supervisor:
    """Over the ranks whose process ids are in `folder`, where failures are left, too.  `told_s`: since they were told to stop."""

    def __init__(self, folder: Path, point: MeetingPoint, limits: Limits, told_s: Callable[[], float | None]):
        self._folder, self._limits, self._told_s = folder, limits, told_s
        self._board = board_of(point)
        told_within = told_within_s(limits.stall_s, Circles(point.size).count)
        later_s = told_within + 2 * tick_s(limits.stall_s)  # the ranks' watchdogs come first
        self._watch = Watch(
            range(point.size), limits.stall_s, 3 * tick_s(limits.stall_s), time.monotonic, limits.first_s, later_s
        )
        self._looked = self._ending_since = 0.0
        self._over = threading.Event()
        self._children: dict[int, multiprocessing.process.BaseProcess | None] = {}

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """While the block waits for the ranks."""
        thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            self._explain_silence()

    def last_words(self) -> dict[int, str]:
        """What each rank was at when it was last heard of."""
        return {rank: note.what for rank, note in self._watch.notes.items() if not note.ended}

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            now = time.monotonic()
            if not self._ending_since and (self.someone_failed() or self._is_late()):
                self._ending_since = now
                self._listen()
            looks = self._limits.stall_s and now - self._looked >= tick_s(self._limits.stall_s)
            if looks:
                self._looked = now
                self._listen()
            if self._ending_since:
                if now - self._ending_since >= GRACE_S:
                    self._kill()
            elif looks and self._watch.notes and self._watch.stalled():  # other entries than a training's give no notes
                self._end_stalled()

    def _listen(self) -> None:
        found = self._board.exchange(None, 1.0)
        self._watch.observe(found or [], reaches_others=found is not None)

    def _end_stalled(self) -> None:
        """No watchdog has ended its rank: all are stopped, or within calls that let nothing else run."""
        self._leave_message()
        self._ending_since = time.monotonic()
        self._kill()

    def _explain_silence(self) -> None:
        """A rank whose interpreter was held was ended by its timer, and could not say why."""
        watch = self._watch
        if self._limits.stall_s and watch.notes and not any(self._folder.glob("*.json")):
            self._listen()
            if any(watch.heard_s(rank) >= self._limits.stall_s for rank in watch.live):
                self._leave_message()

    def _leave_message(self) -> None:
        silent_s = 3 * tick_s(self._limits.stall_s)
        watch = self._watch
        answered = [rank for rank in watch.live if rank in watch.notes and watch.heard_s(rank) < silent_s]
        message = watch.describe(None, answered, "this process")
        Failure(-1, time.time(), "stall", message).leave(self._folder)

    def _is_late(self) -> bool:
        told_s, limit_s = self._told_s(), self._limits.told_s
        return told_s is not None and limit_s is not None and told_s >= limit_s

    def someone_failed(self) -> bool:
        """Whether a rank has ended as none should, or a watchdog has ended one; leaves their ends to be asked for."""
        pids = self._pids()
        if any(pid not in self._children and _runs(pid) for pid in pids):
            # Kept, for the agent may ask for a rank's end first, and then nobody else is told of it.  Once a rank, for this asks
            # for the ends of all, which would take them from the agent (`_peeked`).
            found = {child.pid: child for child in multiprocessing.active_children()}
            self._children |= {pid: found.get(pid) for pid in pids}
        return any(self._folder.glob("*.stall.json")) or any(self._code(pid) not in GOOD_ENDS for pid in pids)

    def _code(self, pid: int) -> int | None:
        """With what a rank has ended; None where it runs, or where the agent has asked for its end and is not through yet."""
        try:
            return _peeked(pid)
        except ChildProcessError:
            child = self._children.get(pid)
            return None if child is None else child.exitcode

    def _pids(self) -> list[int]:
        texts = [path.read_text(encoding="utf-8") for path in self._folder.glob("*.pid")]
        return [int(text) for text in texts if text]

    def _kill(self) -> None:
        for pid in self._pids():
            if _runs(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Whether a child of ours has not ended."""
    try:
        return _peeked(pid) is None
    except ChildProcessError:
        return False


def _peeked(pid: int) -> int | None:
    """With what a child of ours has ended, None where it runs.  Raises ChildProcessError where someone has asked for its end.

    One that has ended stays to be asked for.  The first thread to ask is told how; torch's agent, in the main thread, is not
    made for being the second: it would take a rank that has ended well for one that has failed.
    """
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
