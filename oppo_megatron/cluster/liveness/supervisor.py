"""Ends a host's ranks: after GRACE_S if one failed or is late to stop, at once in a stall that no watchdog could end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from oppo_megatron.cluster.liveness.failures import WELL, Failure, runs
from oppo_megatron.cluster.liveness.stalls import Watch, board_at, tick_s
from oppo_megatron.cluster.liveness.watchdog import verdict_within_s
from oppo_megatron.cluster.rendezvous import MeetingPoint

POLL_S = 0.2
GRACE_S = 8.0


@dataclass(frozen=True)
class Limits:
    stall_s: float  # 0: none
    asked_s: float | None  # after ranks were asked to stop; None: unlimited
    first_s: float  # until the ranks meet

    @classmethod
    def of(cls, config: Any) -> Limits:
        """Limits that the configuration lacks are off."""
        asked_s = getattr(config, "preempt_deadline_s", None) or None
        stall_s = getattr(config, "stall_deadline_s", 0.0)
        return cls(stall_s, asked_s, config.runtime.meeting_s if stall_s else 0.0)


class Supervisor:
    """`folder` has the ranks' process ids and failures; `asked_s`: seconds since they were asked to stop."""

    def __init__(self, folder: Path, point: MeetingPoint, limits: Limits, asked_s: Callable[[], float | None]):
        self._folder, self._limits, self._asked_s = folder, limits, asked_s
        self._board, self._tick_s = board_at(point), tick_s(limits.stall_s)
        later_s = verdict_within_s(limits.stall_s) + 2 * self._tick_s  # the ranks' watchdogs come first
        self._watch = Watch(range(point.size), limits.stall_s, time.monotonic, limits.first_s, later_s)
        self._looked = self._ending_since = 0.0
        self._over = threading.Event()
        self._ranks: dict[Path, psutil.Process | None] = {}

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            watch = self._watch
            if self._limits.stall_s and watch.notes and not any(self._folder.glob("*.json")):
                self._read_notes()
                if any(watch.heard_s(rank) >= self._limits.stall_s for rank in watch.live):
                    self._leave_message()  # a rank's timer ended it, because its interpreter was held

    def last_words(self) -> dict[int, str]:
        return {rank: note.what for rank, note in self._watch.notes.items() if not note.ended}

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            now, asked_s, limit_s = time.monotonic(), self._asked_s(), self._limits.asked_s
            late = asked_s is not None and limit_s is not None and asked_s >= limit_s
            if not self._ending_since and (self.someone_failed() or late):
                self._ending_since = now
                self._read_notes()
            looks = self._limits.stall_s and now - self._looked >= self._tick_s
            if looks:
                self._looked = now
                self._read_notes()
            if self._ending_since:
                if now - self._ending_since >= GRACE_S:
                    self._kill()
            elif looks and self._watch.notes and self._watch.stalled():  # entries other than training's write no notes
                self._leave_message()  # no watchdog has ended its rank: all are stopped, or their interpreters are held
                self._ending_since = time.monotonic()
                self._kill()

    def _read_notes(self) -> None:
        found = self._board.exchange(None, 1.0)
        self._watch.observe(found or [], reaches_others=found is not None)

    def _leave_message(self) -> None:
        watch, silent_s = self._watch, 3 * self._tick_s
        answered = [rank for rank in watch.live if rank in watch.notes and watch.heard_s(rank) < silent_s]
        Failure(-1, time.time(), "stall", watch.describe(None, answered, "this process")).leave(self._folder)

    def someone_failed(self) -> bool:
        """True if a watchdog ended a rank, or one ended without `WELL` (exit codes are known to torch's agent alone)."""
        return any(self._folder.glob("*.stall.json")) or any(
            not _runs(rank) and not path.with_suffix(WELL).exists() for path, rank in self._processes().items()
        )

    def _processes(self) -> dict[Path, psutil.Process | None]:
        for path in self._folder.glob("*.pid"):
            pid = path.read_text(encoding="utf-8")
            if pid and path not in self._ranks:
                try:
                    self._ranks[path] = psutil.Process(int(pid))
                except psutil.NoSuchProcess:
                    self._ranks[path] = None
        return self._ranks

    def _kill(self) -> None:
        for rank in self._processes().values():
            if rank is not None and _runs(rank):
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()


def _runs(rank: psutil.Process | None) -> bool:
    return rank is not None and rank.is_running() and runs(rank.pid)
