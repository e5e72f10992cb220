"""When checkpoints are due, and whether the run waits for them; what they hold is the caller's.

With `checkpoint.asynchronous` the run waits for a snapshot only: a thread writes it, in agreement with the other ranks' threads
over a group of their own, and the ranks find at a later step's meeting that it is whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from oppo_megatron.checkpoint.store import CheckpointStore, Position
from oppo_megatron.config.reliability import CheckpointConfig, TrainCheckpointConfig
from oppo_megatron.runtime.activity import Activity
from oppo_megatron.runtime.peers import waiting_for
from oppo_megatron.runtime.process_groups import new_group
from oppo_megatron.runtime.world import World
from oppo_megatron.train.run_dir import RunDirectory
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.snapshot import Best, Snapshot
from oppo_megatron.train.saving.writing import CheckpointWriting


class Cost(NamedTuple):
    """Of a checkpoint: seconds that the run stood still for it, its bytes, and seconds of writing beside the run."""

    waited_s: float = 0.0
    num_bytes: int = 0
    hidden_s: float = 0.0

    def plus(self, other: Cost) -> Cost:
        return Cost(self.waited_s + other.waited_s, self.num_bytes + other.num_bytes, self.hidden_s + other.hidden_s)

    def describe(self, name: str) -> str:
        """The line of the checkpoint `name`."""
        beside = f", {self.hidden_s:.1f} s of writing beside the run" if self.hidden_s else ""
        return f"checkpoint {name}: {self.num_bytes / 2**20:.1f} MB in {self.waited_s:.1f} s{beside}"


@dataclass(frozen=True)
class Work:
    """A checkpoint to write: `take` makes the snapshot, in memory of its own where it is asked to; `whole` is told at the end.

    `last`: the run is to stop with it, and waits.  `warn` is the one rank's that tells the user.
    """

    position: Position
    take: Callable[[bool], Snapshot]
    whole: Callable[[Cost], None]
    warn: Callable[[str], None] | None
    last: bool


@dataclass(frozen=True)
class Pending:
    """A checkpoint that is being written, for which the run has waited `waited_s`.

    The future's are its bytes, and the seconds that a thread took to write it; `beside`: what that thread does, if there is one.
    """

    work: Work
    waited_s: float
    written: Future[tuple[int, float]]
    beside: Activity | None


class CheckpointKeeper:
    """One rank's part.  Calls are collective of the world but for `due` and `take_cost`."""

    def __init__(self, config: CheckpointConfig, run_dir: Path, world: World, preemption: Preemption):
        self.rules, self.world, self.preemption = config, world, preemption
        self.store = CheckpointStore(RunDirectory(run_dir).checkpoints)
        self.stopping = False
        self.best: Best | None = None
        self.saved: Position | None = None
        self._group = new_group(range(world.size), "checkpoints", backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Pending | None = None
        self._cost = Cost()
        self._saved_at, self._overdue = time.monotonic(), False

    def look_around(self) -> None:
        """All ranks have met: was any told to stop, and is the last checkpoint whole?"""
        every_s = 60.0 * self.rules.every_minutes
        overdue = bool(every_s) and time.monotonic() - self._saved_at >= every_s
        self.stopping, self._overdue = self.preemption.agreed_with(overdue, self.world.activity)
        if self._pending is not None:
            written = torch.tensor([int(self._pending.written.done())])
            with waiting_for("ranks that write a checkpoint", self.world.activity):
                dist.all_reduce(written, op=dist.ReduceOp.MIN)
            if written.item():
                self.conclude()

    def due(self, step: int) -> bool:
        """After a step."""
        every = self.rules.every_steps
        return self.stopping or self._overdue or bool(every and step % every == 0)

    def take_cost(self) -> Cost:
        """Of checkpoints, since the last call."""
        cost, self._cost = self._cost, Cost()
        return cost

    def judge(self, position: Position, value: float) -> None:
        """The checkpoint at `position` is the best so far if `value` is the highest."""
        if math.isfinite(value) and (self.best is None or value > self.best[0]):
            self.best = value, position

    def write(self, work: Work, started: float) -> None:
        """Write a checkpoint; when this returns it is whole, or the run may go on.  The one before is whole.

        It is whole where the run is to stop with it, or `checkpoint.asynchronous` is off.  `started`: when the run began to
        wait for it (monotonic seconds).
        """
        assert self._pending is None
        behind = self.rules.asynchronous and not work.last
        self._saved_at, self._overdue = time.monotonic(), False
        with waiting_for(f"checkpoint {work.position.name}", self.world.activity, waits=False):
            writing = CheckpointWriting(
                self.store,
                self._group,
                work.take(behind),
                keep=self.rules.keep,
                keep_best=isinstance(self.rules, TrainCheckpointConfig) and self.rules.keep_best,
                warn=work.warn,
                activity=Activity() if behind else self.world.activity,
            )
            written = self._thread.submit(_timed, writing) if behind else _done((writing.run(), 0.0))
        beside = writing.activity if behind else None
        self._pending = Pending(work, time.monotonic() - started, written, beside)
        if not behind:
            self.conclude()
        if work.last:
            self.preemption.saved()

    def conclude(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.  Raises CheckpointError where it could not be."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        started, at, position = time.monotonic(), self.world.activity, pending.work.position
        with waiting_for(f"checkpoint {position.name}", at, waits=False), at.doing(pending.beside or "written"):
            num_bytes, took_s = pending.written.result()
        waited_s = time.monotonic() - started
        cost = Cost(pending.waited_s + waited_s, num_bytes, max(0.0, took_s - waited_s))
        self._cost = self._cost.plus(cost)
        self.saved = position
        pending.work.whole(cost)


def _timed(writing: CheckpointWriting) -> tuple[int, float]:
    """Bytes and seconds."""
    started = time.monotonic()
    return writing.run(), time.monotonic() - started


def _done(written: tuple[int, float]) -> Future[tuple[int, float]]:
    future: Future[tuple[int, float]] = Future()
    future.set_result(written)
    return future
