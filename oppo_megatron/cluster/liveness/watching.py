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

from oppo_megatron.cluster.liveness.board import board_of, tick_s
from oppo_megatron.cluster.liveness.circles import Circles
from oppo_megatron.cluster.liveness.failures import end_stalled
from oppo_megatron.cluster.liveness.stalls import Watch
from oppo_megatron.cluster.liveness.summaries import Summaries
from oppo_megatron.cluster.liveness.watchdog import Watchdog
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
    dog = _watchdog(world, deadline_s, RunDirectory(run_dir).stacks, environment, partial(end, world.rank, command))
    with dog.watching():
        yield


def _watchdog(
    world: World, deadline_s: float, folder: Path, environment: Mapping[str, str], end: Callable[[str], None]
) -> Watchdog:
    """Of this rank, over the notes of its circle."""
    circles, longest_s = Circles(world.size), 3 * tick_s(deadline_s)
    number = circles.number(world.rank)
    members, several = circles.members(number), circles.count > 1
    watch = Watch(members, deadline_s, longest_s, time.monotonic, whole=not several)
    if world.size == 1 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return Watchdog(world.rank, watch, world.activity, None, folder, end)
    point, far = MeetingPoint.from_environment(environment, world.rank, world.size), None
    if several:
        numbers = range(circles.count)
        others = Watch(numbers, deadline_s, longest_s, time.monotonic)
        far = Summaries(circles, number, board_of(point, numbers, "circles"), others)
    return Watchdog(world.rank, watch, world.activity, board_of(point, members), folder, end, far)


def stacks_on_request() -> None:
    """From now on SIGUSR2 asks.  The answer comes at once, whatever the process is at, and disturbs nothing."""
    if hasattr(faulthandler, "register") and sys.__stderr__ is not None:
        with contextlib.suppress(ValueError, OSError):  # a stderr that is no file
            faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)
