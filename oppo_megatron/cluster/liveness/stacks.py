"""What a process is at, for who asks from outside: `kill -USR2 PID` has it write the stacks of its threads to stderr."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys


def stacks_on_request() -> None:
    """From now on SIGUSR2 asks.  The answer comes at once, whatever the process is at, and disturbs nothing."""
    if hasattr(faulthandler, "register") and sys.__stderr__ is not None:
        with contextlib.suppress(ValueError, OSError):  # a stderr that is no file
            faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)
