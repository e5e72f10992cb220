"""The project's exceptions.

Each class is also a standard-library error.  A message states the value, the rule it breaks and the remedy.  `assert` is for
our own bugs; these are for faults that a user or a peer rank can cause.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

EXIT_REQUEUE = 75
"""Exit code of a run that was asked to stop and should be started again (EX_TEMPFAIL of sysexits.h)."""
EXIT_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended before there was anything to save, or a second time."""
INTERRUPTED = "interrupted: the run saves what it has trained, and ends soon; Ctrl-C once more ends it at once, unsaved"
"""The message at the first Ctrl-C."""
EXIT_AGAIN = 76
"""Exit code of ranks that a guard wants restarted from the last checkpoint; other launchers than ours see EXIT_REQUEUE."""
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a write that finds no place."""


class OppoError(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigError(OppoError, ValueError):
    """The user's input is wrong: settings, arguments, or files or packages that they name.  `problems`: one sentence each."""

    def __init__(self, problems: Sequence[str] | str):
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        several = "\n".join([f"{len(self.problems)} problems:", *(f"  - {problem}" for problem in self.problems)])
        super().__init__(self.problems[0] if len(self.problems) == 1 else several)


class DataError(OppoError, ValueError):
    """A row, file or data set cannot be used."""


class CheckpointError(OppoError, ValueError):
    """A checkpoint is missing, truncated, or does not fit the model that is to load it."""


class CapacityError(OppoError, MemoryError):
    """A budget (bytes of KV cache, context length) cannot hold the request."""


class StreamError(OppoError, RuntimeError):
    """A chunk message was lost, repeated, reordered or corrupted on its way to the scorers."""


class ScheduleError(OppoError, ValueError):
    """A schedule cannot be read, or could not be carried out: it would hang, break causality or overrun a budget."""


class StallError(OppoError, TimeoutError):
    """A rank waited in vain: the message names the rank, the action that it waited for, and for how long."""


class WorldError(OppoError, ConnectionError):
    """The ranks of a run did not find each other, or have lost each other."""


class RewardError(OppoError, RuntimeError):
    """A reward could not be computed or is not a finite number.  A failure is never turned into a score."""


class PluginError(OppoError, RuntimeError):
    """A user's function failed, or returned a value that cannot be used."""


class SamplingError(OppoError, RuntimeError):
    """No batch can be sampled: of the prompts' responses too few are worth training."""


class PlacementError(OppoError, RuntimeError):
    """A placement that was to be measured could not run."""


class NumericsError(OppoError, ArithmeticError):
    """A quantity that must be finite or within a gate (loss, gradient norm, log-prob gap) is not."""
