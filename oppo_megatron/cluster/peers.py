"""Turns failed waits for a peer into StallErrors that name the wait."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch.distributed as dist

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.process_groups import world_timeout
from oppo_megatron.errors import StallError


def is_lost_peer(error: RuntimeError) -> bool:
    """True if a communication back end raised the error; gloo's errors have no class."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("/gloo/", "NCCL"))


def first_clause(error: Exception) -> str:
    """The first clause of a back end's message, without the source file that raised it."""
    clause = re.split(r"\. |\n", str(error))[0]
    return re.sub(r"^\[\S+\]\s*", "", clause).rstrip(".") or "no answer"


def stalled(rank: int, what: str, error: RuntimeError, timeout_s: float, waited_s: float | None = None) -> StallError:
    """The error of a rank that waited for `what` in vain; `waited_s` if known."""
    waited = "" if waited_s is None else f" for {waited_s:.1f} s"
    return StallError(
        f"rank {rank} waited{waited} in vain for `{what}` ({first_clause(error)}). The peer has died or hangs: see its own "
        f"message; runtime.timeout_s is {timeout_s:g}."
    )


@contextlib.contextmanager
def waiting_for(what: str, activity: Activity | None = None, *, waits: bool = True) -> Iterator[None]:
    """A section in which ranks wait for each other.  Raises StallError with its name if a peer does not come.

    `activity` shows it; `waits`: this rank does nothing but wait.
    """
    noted = contextlib.nullcontext() if activity is None else activity.doing(what, waits=waits)
    try:
        with noted:
            yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise stalled(dist.get_rank(), what, error, world_timeout().total_seconds()) from error
