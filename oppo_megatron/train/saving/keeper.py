"""Decides when checkpoints are due, takes their snapshots, and keeps the best one; PPO and supervised training add their state.

With `checkpoint.asynchronous` the run waits for the snapshot only.  A thread writes it, in agreement with the threads of other
ranks over a process group of their own, and the ranks learn at a later meeting that it is complete.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from oppo_megatron.cluster.activity import Activity
from oppo_megatron.cluster.process_groups import new_group, waiting_for
from oppo_megatron.cluster.world import World
from oppo_megatron.config.derived import best_standard
from oppo_megatron.config.evaluation import REWARD
from oppo_megatron.config.load import plain_settings
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.control.estimates import Figures
from oppo_megatron.errors import CheckpointError
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.mcore.weights.checkpoint import gather_models, load_models
from oppo_megatron.nesting import read_json
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.train.saving.caches import CacheContents
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.resuming import Found
from oppo_megatron.train.saving.state import adapter_state, changes, describe_start
from oppo_megatron.train.saving.writing import MODELS, STATE, Best, CheckpointWriting, Snapshot
from oppo_megatron.train.update import History


class Saveable(Protocol):
    """One rank's part of a run, between two rounds or steps."""

    @property
    def position(self) -> Position: ...

    @property
    def within_step(self) -> bool: ...

    @property
    def models(self) -> Mapping[str, TrainedModel]:
        """The trained models of this rank, by role."""
        ...

    @property
    def note(self) -> Callable[[str], None] | None:
        """Show a message to the user; None on all ranks but one, which also writes the state."""
        ...

    def finish_step(self) -> None:
        """Complete all work under way; collective of the world."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything but models, caches and rollouts, in plain JSON types; called on the rank that has `note`."""
        ...


RunT = TypeVar("RunT", bound=Saveable)


class Cost(NamedTuple):
    """Seconds that the run waited for a checkpoint, its bytes, and seconds of writing during which the run continued."""

    waited_s: float = 0.0
    num_bytes: int = 0
    hidden_s: float = 0.0

    def plus(self, other: Cost) -> Cost:
        return Cost(self.waited_s + other.waited_s, self.num_bytes + other.num_bytes, self.hidden_s + other.hidden_s)


@dataclass(frozen=True)
class Pending:
    """A checkpoint under way; the run waited `waited_s` for it so far.

    `written` gives its bytes and the seconds a thread took; `activity` is the thread's, if there is one.
    """

    position: Position
    note: Callable[[str], None] | None
    on_complete: Callable[[], None]
    waited_s: float
    written: Future[tuple[int, float]]
    activity: Activity | None


class CheckpointKeeper(ABC, Generic[RunT]):
    """One rank's part.  Calls are collective of the world except `due`, `measured` and `take_cost`.

    `standard` names the metric of the best checkpoint; None if there is no such metric.
    """

    def __init__(self, config: TrainConfig | SupervisedConfig, world: World, preemption: Preemption):
        self.rules, self.standard, self.world, self.preemption = (
            config.checkpoint, best_standard(config), world, preemption,
        )  # fmt: skip
        self.run_dir = RunDirectory(config.run_dir)
        self.store = CheckpointStore(self.run_dir.checkpoints)
        self.settings, self.adapters = plain_settings(config), adapter_state(config)
        self.sources: dict[str, str] = {}
        self.stopping = False
        self.best: Best | None = None
        self.saved: Position | None = None
        self._group = new_group(range(world.size), "checkpoints", backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Pending | None = None
        self._cost = Cost()
        self._saved_at, self._overdue = time.monotonic(), False
        self._measured: tuple[int, float] | None = None

    @cached_property
    @abstractmethod
    def data(self) -> dict[str, Any]:
        """Everything that fixes the order of the data."""

    def caches(self, run: RunT, *, copied: bool) -> CacheContents | None:
        """Caches of sequences in flight, if the checkpoint has them."""
        return None

    def texts(self, run: RunT) -> dict[str, str]:
        """Text files of a checkpoint by name, on the rank that has `run.note`."""
        return {STATE: json.dumps(self.state(run), indent=1)}

    def state(self, run: RunT) -> dict[str, Any]:
        """Content of `state.json`."""
        return {
            **run.state_dict(),
            "saved_at": time.time(),
            "data": self.data,
            "adapters": self.adapters,
            "best": None if self.best is None else [self.best[0], [self.best[1].step, self.best[1].clock]],
            "best_metric": self.standard and self.standard.metric,
            "config": self.settings,
        }

    def on_complete(self, run: RunT) -> Callable[[], None]:
        """Return what is to be called when the checkpoint of the run as it is now is complete."""
        return lambda: None

    def look_around(self) -> None:
        """Learn from all ranks whether one was asked to stop, and whether the last checkpoint is complete."""
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
        """True if a checkpoint is due after `step`."""
        every, standard = self.rules.every_steps, self.standard
        # Rewards come with every step and are uncertain: the best of the checkpoints that are saved anyway is enough.
        best = self.rules.keep_best and standard is not None and standard.metric != REWARD and self._is_best(step)
        return self.stopping or self._overdue or best or bool(every and step % every == 0)

    def take_cost(self) -> Cost:
        """Return the cost of checkpoints since the last call."""
        cost, self._cost = self._cost, Cost()
        return cost

    def measured(self, step: int, value: float) -> None:
        """Note the value of the standard's metric after `step` steps."""
        self._measured = step, value

    def look_at(self, step: int, figures: Figures) -> None:
        """Note held-out metrics after `step` steps."""
        if self.standard is not None and self.standard.metric in figures:
            self.measured(step, figures[self.standard.metric][0])

    def _is_best(self, step: int) -> bool:
        """True if the value measured after `step` is better than the best checkpoint's."""
        if self._measured is None or self._measured[0] != step or not math.isfinite(value := self._measured[1]):
            return False
        assert self.standard is not None
        return self.best is None or self.standard.gain(value, self.best[0]) > 0

    def load_best(self, models: Mapping[str, TrainedModel], now: Position) -> bool:
        """Load the best checkpoint into `models`, which are at position `now`; False if none is kept.

        The run has ended: its counters and logs are not touched.
        """
        if not self.rules.keep_best or self.best is None:
            return False
        folder = self.store.folder(self.best[1])
        if self.best[1] != now:
            updates = updates_of(read_json((folder / STATE).read_text(encoding="utf-8")), models)
            with waiting_for("models of the best checkpoint", self.world.activity, waits=False):
                load_models(folder / MODELS, models, updates)
        return True

    def load(self, models: Mapping[str, TrainedModel], found: Found) -> None:
        """Load weights, optimizers and schedules.  Raises CheckpointError for other models or a damaged file."""
        state = found.state
        best = None if state["best"] is None else (state["best"][0], Position(*state["best"][1]))
        same = self.standard is not None and state["best_metric"] == self.standard.metric
        self.best = best if same and best is not None and self.store.folder(best[1]).is_dir() else None
        updates = updates_of(state, models)
        with waiting_for("models of the checkpoint", self.world.activity, waits=False):
            load_models(found.folder / MODELS, models, updates)
        for name, model in models.items():
            model.resume_schedule(updates[name])

    def describe(self, found: Found) -> list[str]:
        """Return a line about the checkpoint that the run continues from, and a line per changed setting."""
        then, sources = found.state["config"], found.state.get("sources", {})
        start = describe_start(self.run_dir.path, found.folder.name, found.state["done"], found.state["saved_at"])
        return [start, *changes(then, self.settings, sources, self.sources)]

    def save(self, run: RunT) -> None:
        """Write the run's state.  Returns when the checkpoint is complete, or, if it is asynchronous, when the run may continue.

        If the run is to stop with this checkpoint, it waits for it.
        """
        self.conclude()
        started, last = time.monotonic(), self.stopping or run.within_step
        run.finish_step()
        position, note = run.position, run.note
        if position.clock < 0 and self._is_best(position.step):
            assert self._measured is not None
            self.best = self._measured[1], position
        threaded = self.rules.asynchronous and not last
        activity = Activity() if threaded else self.world.activity
        self._saved_at, self._overdue = time.monotonic(), False
        with waiting_for(f"checkpoint {position.name}", self.world.activity, waits=False):
            writing = CheckpointWriting(
                self.store, self._group, self.snapshot(run, copied=threaded),
                keep=self.rules.keep, keep_best=bool(self.rules.keep_best), warn=note, activity=activity,
            )  # fmt: skip
            written = self._thread.submit(_timed, writing) if threaded else _done((writing.run(), 0.0))
        waited_s = time.monotonic() - started
        self._pending = Pending(
            position, note, self.on_complete(run), waited_s, written, activity if threaded else None
        )
        if not threaded:
            self.conclude()
        if last:
            self.preemption.saved()

    def snapshot(self, run: RunT, *, copied: bool) -> Snapshot:
        """Take this rank's part of a snapshot; if `copied`, into memory that later steps do not change."""
        models, caches = gather_models(run.models, copied=copied), self.caches(run, copied=copied)
        return Snapshot(run.position, models, caches, {} if run.note is None else self.texts(run), self.best)

    def save_end(self, run: RunT) -> None:
        """Save after the last step and its weights; if the disk is full now, only later continuation is lost."""
        if not self.rules.saves_end or self.saved == run.position:
            return
        try:
            self.save(run)
            self.conclude()
        except CheckpointError as error:
            if run.note is not None:
                run.note(f"the run has ended, but cannot be given more steps later: {error}")

    def conclude(self) -> None:
        """Wait for the checkpoint under way, if there is one.  Raises CheckpointError if it could not be written."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        started, at, name = time.monotonic(), self.world.activity, pending.position.name
        with waiting_for(f"checkpoint {name}", at, waits=False), at.doing(pending.activity or "written"):
            num_bytes, took_s = pending.written.result()
        waited_s = time.monotonic() - started
        cost = Cost(pending.waited_s + waited_s, num_bytes, max(0.0, took_s - waited_s))
        self._cost = self._cost.plus(cost)
        self.saved = pending.position
        pending.on_complete()
        if pending.note is not None:
            hidden = f", {cost.hidden_s:.1f} s of writing while the run continued" if cost.hidden_s else ""
            pending.note(f"checkpoint {name}: {num_bytes / 2**20:.1f} MB in {cost.waited_s:.1f} s{hidden}")


def updates_of(state: Mapping[str, Any], models: Iterable[str]) -> dict[str, int]:
    """Optimizer steps of each model in a checkpoint's state; the critic's warm-up adds to its own."""
    warmed = History.of(state.get("history", {})).warmed
    return {name: state["updates"] + (warmed if name == "critic" else 0) for name in models}


def _timed(writing: CheckpointWriting) -> tuple[int, float]:
    """Bytes and seconds."""
    started = time.monotonic()
    return writing.run(), time.monotonic() - started


def _done(written: tuple[int, float]) -> Future[tuple[int, float]]:
    future: Future[tuple[int, float]] = Future()
    future.set_result(written)
    return future
