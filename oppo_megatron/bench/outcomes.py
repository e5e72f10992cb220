"""How a benchmark ends that does not come to its figures."""

from __future__ import annotations

from oppo_megatron.errors import OppoError


class BenchError(OppoError, RuntimeError):
    """A run of a benchmark did not come to its end; its own message says why."""


class BenchStopped(BenchError):
    """The benchmark was told to stop, and the run at work with it."""
