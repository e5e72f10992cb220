"""The project's exceptions, whose messages state value, rule and remedy; `assert` is for our own bugs."""

from __future__ import annotations

import errno
from collections.abc import Sequence

EXIT_REQUEUE = 75
"""Exit code of a stopped run that should be started again (EX_TEMPFAIL of sysexits.h)."""
EXIT_BROKEN_PIPE = 141
"""Exit code if the reader of the output has ended, as a shell reports for SIGPIPE."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C with nothing to save, or after a second Ctrl-C."""
INTERRUPTED = "interrupted: the run saves what it has trained, and ends soon; Ctrl-C once more ends it at once, unsaved"
"""The message at the first Ctrl-C."""
EXIT_AGAIN = 76
"""Exit code of ranks that a guard wants restarted; launchers other than ours see EXIT_REQUEUE."""
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a write to a full disk or quota."""


class OppoError(Exception):
    """Base of errors raised on purpose."""


class ConfigError(OppoError, ValueError):
    """Wrong settings, arguments, files or packages.  `problems`: a sentence each."""

    def __init__(self, problems: Sequence[str] | str):
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        several = "\n".join([f"{len(self.problems)} problems:", *(f"  - {problem}" for problem in self.problems)])
        super().__init__(self.problems[0] if len(self.problems) == 1 else several)


class DataError(OppoError, ValueError):
    """An unusable row, file or data set."""


class CheckpointError(OppoError, ValueError):
    """A missing, truncated or unsuitable checkpoint."""


class CapacityError(OppoError, MemoryError):
    """A budget (KV cache, context length) is too small."""


class StreamError(OppoError, RuntimeError):
    """A lost, repeated, reordered or corrupted chunk message."""


class ScheduleError(OppoError, ValueError):
    """An unreadable schedule, or one that hangs, breaks causality or overruns a budget."""


class StallError(OppoError, TimeoutError):
    """A wait timed out; the message names rank, action and time."""


class WorldError(OppoError, ConnectionError):
    """Ranks did not find or have lost each other."""


class RewardError(OppoError, RuntimeError):
    """A reward failed or is not finite; failures never become scores."""


class PluginError(OppoError, RuntimeError):
    """A user's function failed or returned an unusable value."""


class SamplingError(OppoError, RuntimeError):
    """Too few responses are worth training."""


class PlacementError(OppoError, RuntimeError):
    """A placement to be measured could not run."""


class NumericsError(OppoError, ArithmeticError):
    """A loss, gradient norm, log-prob gap or the like is not finite or exceeds its gate."""
