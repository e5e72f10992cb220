"""Stopping on signals: every rank learns of them at the same point of the run.

SIGUSR1, SIGHUP and the first SIGTERM or SIGINT (Ctrl-C) ask for a checkpoint.  A second SIGTERM or SIGINT, or a missed deadline,
ends the process at once, leaving the last complete checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.process_groups import waiting_for
from oppo_megatron.errors import EXIT_REQUEUE, INTERRUPTED
from oppo_megatron.processes import ONCE, hears

HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Set in ranks that torchrun's agent has started."""

ECHO_S = 2.0
"""A repeated signal within this time is the same one, forwarded by torchrun."""

DEADLINE_S = 120.0


class Preemption:
    """Signal handling of one rank, which ends unsaved `deadline_s` after being `asked` to stop (0: ignore signals)."""

    def __init__(self, deadline_s: float = DEADLINE_S):
        self.deadline_s = deadline_s
        self.asked = False
        self._terms, self._first_at = 0, 0.0
        self._deadline: threading.Timer | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals in the block, if called from the main thread.

        A rank that fails among others ignores later signals, because it must still report the reason.
        """
        if not self.deadline_s or threading.current_thread() is not threading.main_thread():
            yield
            return
        # The handlers do nothing, but without them the signals would not reach the thread.
        before = {number: signal.signal(number, lambda *_: None) for number in HEARD if hears(number)}
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
        if not self.asked:
            self.asked = True
            self._deadline = threading.Timer(self.deadline_s, self._too_late)
            self._deadline.daemon = True
            self._deadline.start()

    def saved(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def agreed(self, group: dist.ProcessGroup | None, activity: Activity | None = None) -> bool:
        """True if any rank of the group (None: the world) was asked to stop.  Collective."""
        return self.agreed_with(False, activity, group)[0] if self.deadline_s else self.asked

    def agreed_with(
        self, mine: bool, activity: Activity | None = None, group: dist.ProcessGroup | None = None
    ) -> tuple[bool, bool]:
        """`agreed`, and whether `mine` is true on any rank, in one message."""
        if dist.get_world_size(group) == 1:
            return self.asked, mine
        flags = torch.tensor([int(self.asked), int(mine)])
        with waiting_for("ranks that may have been asked to stop", activity):
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        asked, any_rank = map(bool, flags.tolist())
        if asked:
            self.ask()
        return asked, any_rank

    def _hear(self, reads: int) -> None:
        """Read signals in a thread, because the main thread runs no handlers while it waits in a call."""
        with open(reads, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] not in HEARD:
                    continue
                now = time.monotonic()
                if number[0] not in ONCE and (not self._terms or TORCHRUN not in os.environ or now - self._first_at >= ECHO_S):
                    self._terms, self._first_at = self._terms + 1, self._first_at or now
                if self._terms > 1:
                    os._exit(128 + number[0])
                if number[0] == signal.SIGINT and not self.asked and dist.get_rank() == 0:
                    print(INTERRUPTED, file=sys.stderr, flush=True)
                self.ask()

    def _too_late(self) -> None:
        print(
            f"asked to stop, but nothing was saved within preempt_deadline_s={self.deadline_s:g}: this rank ends; "
            "--resume continues from the last complete checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_REQUEUE)
