"""Decides when checkpoints are due, and whether the run waits for them; the caller gives their content.

With `checkpoint.asynchronous` the run waits for a snapshot only: a thread writes it, in agreement with the other ranks' threads
over a group of their own, and the ranks learn at a later step's meeting that it is complete.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.peers import waiting_for
from oppo_megatron.cluster.process_groups import new_group
from oppo_megatron.cluster.world import World
from oppo_megatron.config.evaluation import REWARD, Standard
from oppo_megatron.config.reliability import CheckpointConfig
from oppo_megatron.control.estimates import Figures
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.weights.checkpoint import load_models
from oppo_megatron.nesting import read_json
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.snapshot import MODELS, STATE, Best, Snapshot, updates_of
from oppo_megatron.train.saving.writing import CheckpointWriting


class Cost(NamedTuple):
    """The cost of a checkpoint: seconds that the run stood still for it, its bytes, and seconds of writing beside the run."""

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
    """One rank's part.  Calls are collective of the world but for `due`, `measured` and `take_cost`.

    `standard`: what tells the best checkpoint, where anything does.
    """

    def __init__(
        self, config: CheckpointConfig, standard: Standard | None, run_dir: Path, world: World, preemption: Preemption
    ):
        self.rules, self.standard, self.world, self.preemption = config, standard, world, preemption
        self.store = CheckpointStore(RunDirectory(run_dir).checkpoints)
        self.stopping = False
        self.best: Best | None = None
        self.saved: Position | None = None
        self._group = new_group(range(world.size), "checkpoints", backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Pending | None = None
        self._cost = Cost()
        self._saved_at, self._overdue = time.monotonic(), False
        self._measured: tuple[int, float] | None = None

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
        every, standard = self.rules.every_steps, self.standard
        # By rewards, which come with every step and are uncertain, the best of those that are saved anyway is enough.
        best = self.rules.keep_best and standard is not None and standard.metric != REWARD and self._is_best(step)
        return self.stopping or self._overdue or best or bool(every and step % every == 0)

    def take_cost(self) -> Cost:
        """The cost of checkpoints since the last call."""
        cost, self._cost = self._cost, Cost()
        return cost

    def measured(self, step: int, value: float) -> None:
        """What the `standard` looks at was so much after `step` steps."""
        self._measured = step, value

    def look_at(self, step: int, figures: Figures) -> None:
        """Held-out metrics after `step` steps."""
        if self.standard is not None and self.standard.metric in figures:
            self.measured(step, figures[self.standard.metric][0])

    def load_best(self, models: Mapping[str, TrainedModel], now: Position) -> bool:
        """Make `models`, which are as they were at `now`, those of the best checkpoint; False where none is kept.

        The run has ended: what tells of its course is not touched.
        """
        if not self.rules.keep_best or self.best is None:
            return False
        folder = self.store.folder(self.best[1])
        if self.best[1] != now:
            updates = updates_of(read_json((folder / STATE).read_text(encoding="utf-8")), models)
            with waiting_for("models of the best checkpoint", self.world.activity, waits=False):
                load_models(folder / MODELS, models, updates)
        return True

    def judge(self, position: Position) -> None:
        """The checkpoint at `position` is the best so far if what was measured there says so."""
        if position.clock < 0 and self._is_best(position.step):
            assert self._measured is not None
            self.best = self._measured[1], position

    def resume_best(self, best: Best | None, metric: str | None) -> None:
        """What a checkpoint says of the best one, by `metric`; one that another figure told, or that is gone, is none."""
        same = self.standard is not None and metric == self.standard.metric
        self.best = best if same and best is not None and self.store.folder(best[1]).is_dir() else None

    def _is_best(self, step: int) -> bool:
        """Whether what was measured after the step is better than the best checkpoint."""
        if self._measured is None or self._measured[0] != step or not math.isfinite(value := self._measured[1]):
            return False
        assert self.standard is not None
        return self.best is None or self.standard.gain(value, self.best[0]) > 0

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
                keep_best=bool(self.rules.keep_best),
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
