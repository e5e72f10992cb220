"""Stopping on signals: they are noted, and every rank learns of them at the same place of the run.

SIGUSR1, SIGHUP and the first SIGTERM or SIGINT (Ctrl-C) ask for a checkpoint.  A second SIGTERM or SIGINT, or a missed
deadline, ends the process at once: the last checkpoint is whole, because a checkpoint under way has no name yet.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.peers import waiting_for
from oppo_megatron.errors import EXIT_REQUEUE, INTERRUPTED
from oppo_megatron.processes import ONCE, hears

HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable of ranks that torch's agent has started."""

ECHO_S = 2.0
"""torchrun passes on what it is sent.  A terminal or a scheduler has sent it to the ranks, too: so long it is the same signal."""


DEADLINE_S = 120.0
"""As `preempt_deadline_s` is where nothing is said."""


class Preemption:
    """One rank's ear.  `asked`: this process was told; what the ranks agreed on is theirs who ask.

    A run that could not be saved within `deadline_s` ends unsaved; 0: it hears nothing.
    """

    def __init__(self, deadline_s: float = DEADLINE_S):
        self.deadline_s = deadline_s
        self.asked = False
        self._terms, self._first_at = 0, 0.0
        self._deadline: threading.Timer | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear signals in the block; only a process's main thread can.

        A rank that fails among its peers hears none afterwards: it is about to end, and has yet to say why.
        """
        if not self.deadline_s or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, _leave_to_the_thread) for number in HEARD if hears(number)}
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        earlier = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        threading.Thread(target=self._hear, args=(reads,), name="preemption", daemon=True).start()
        failed = True
        try:
            yield
            failed = False
        finally:
            self.saved()
            among_peers = dist.get_world_size() > 1
            ends = self.asked or (failed and among_peers)
            for number, handler in before.items():
                heard = not ends or (number == signal.SIGINT and not among_peers)  # a terminal's user has the last word
                signal.signal(number, handler if heard else signal.SIG_IGN)
            signal.set_wakeup_fd(earlier)
            os.close(writes)

    def ask(self) -> None:
        """As a signal would."""
        if not self.asked:
            self.asked = True
            self._deadline = threading.Timer(self.deadline_s, self._too_late)
            self._deadline.daemon = True
            self._deadline.start()

    def saved(self) -> None:
        """The deadline is met."""
        if self._deadline is not None:
            self._deadline.cancel()

    def agreed(self, group: dist.ProcessGroup | None, activity: Activity | None = None) -> bool:
        """Whether any rank of the group (None: of the world) was told before its call; all of them make the call.

        What a rank is told while it waits for the others counts at the next call: they did not hear of it.
        """
        if not self.deadline_s or dist.get_world_size(group) == 1:
            return self.asked
        told = torch.tensor([int(self.asked)])
        with waiting_for("ranks that may have been told to stop", activity):
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        if told.item():
            self.ask()
        return bool(told.item())

    def agreed_with(self, mine: bool, activity: Activity | None = None) -> tuple[bool, bool]:
        """`agreed` of the world, and whether `mine` is true on any rank: one message for both."""
        if dist.get_world_size() == 1:
            return self.asked, mine
        told = torch.tensor([int(self.asked), int(mine)])
        with waiting_for("ranks that may have been told to stop", activity):
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
        asked, any_rank = map(bool, told.tolist())
        if asked:
            self.ask()
        return asked, any_rank

    def _hear(self, reads: int) -> None:
        """Runs in a thread of its own: the main one may wait for a peer in a call, and then runs no handler."""
        with open(reads, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] not in HEARD:
                    continue
                self._terms += self._counts(number[0])
                if self._terms > 1:
                    os._exit(128 + number[0])
                if number[0] == signal.SIGINT and not self.asked and dist.get_rank() == 0:
                    print(INTERRUPTED, file=sys.stderr, flush=True)
                self.ask()

    def _counts(self, number: int) -> bool:
        """Whether a second signal of this kind ends the process."""
        if number in ONCE:
            return False
        now = time.monotonic()
        if self._terms == 0:
            self._first_at = now
            return True
        return TORCHRUN not in os.environ or now - self._first_at >= ECHO_S

    def _too_late(self) -> None:
        print(
            f"told to stop, but nothing was saved within preempt_deadline_s={self.deadline_s:g}: this rank ends; "
            "--resume continues from the last whole checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_REQUEUE)


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    """A handler there must be, or the signal would not be noted for the thread."""
