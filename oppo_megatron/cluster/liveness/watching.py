"""Starts a rank's watchdog around its work."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from oppo_megatron.cluster.liveness.failures import end_stalled
from oppo_megatron.cluster.liveness.stalls import Watch
from oppo_megatron.cluster.liveness.watchdog import Watchdog, board_of, tick_s
from oppo_megatron.cluster.rendezvous import MeetingPoint
from oppo_megatron.cluster.world import World
from oppo_megatron.rundir.directory import RunDirectory


@contextmanager
def watched(
    world: World,
    deadline_s: float,
    run_dir: Path,
    command: str,
    environment: Mapping[str, str] = os.environ,
    end: Callable[[int, str, str], None] = end_stalled,
) -> Iterator[None]:
    """End this process, by `end` (rank, command, message), if the run stands still in the block for `deadline_s`; 0: never."""
    if not deadline_s:
        yield
        return
    meets = world.size > 1 or environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    board = board_of(MeetingPoint.from_environment(environment, world.rank, world.size)) if meets else None
    watch = Watch(range(world.size), deadline_s, 3 * tick_s(deadline_s), time.monotonic)
    folder = RunDirectory(run_dir).stacks
    dog = Watchdog(world.rank, watch, world.activity, board, folder, partial(end, world.rank, command))
    with dog.watching():
        yield


def stacks_on_request() -> None:
    """From now on SIGUSR2 asks.  The answer comes at once, whatever the process is at, and disturbs nothing."""
    if hasattr(faulthandler, "register") and sys.__stderr__ is not None:
        with contextlib.suppress(ValueError, OSError):  # a stderr that is no file
            faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)
