"""Decides when checkpoints are due, takes their snapshots, and keeps the best one.

With `checkpoint.asynchronous` the run waits only for the snapshot.  Threads of all ranks then write it, in agreement over their
own process group.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oppo_megatron.clock import while_silent
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
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.state import Found, adapter_state, describe_changes
from oppo_megatron.train.saving.writing import MODELS, STATE, CacheContents, CheckpointWriting, Snapshot
from oppo_megatron.train.update import History


class Saveable(ABC):
    """One rank's part of a run, between two rounds or steps."""

    @property
    @abstractmethod
    def position(self) -> Position: ...

    @property
    @abstractmethod
    def models(self) -> Mapping[str, TrainedModel]: ...

    @property
    @abstractmethod
    def note(self) -> Callable[[str], None] | None:
        """Show a message to the user; None except on the rank that also writes the state."""

    @abstractmethod
    def finish_step(self) -> None:
        """Complete all pending work.  Collective of the world."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything but models, caches and rollouts, in JSON types; called on the rank with `note`."""

    def texts(self) -> dict[str, str]:
        return {}

    def caches(self, *, copied: bool) -> CacheContents | None:
        return None

    def on_complete(self) -> Callable[[], None]:
        """Return the callback for when a checkpoint of the current state is complete."""
        return lambda: None


NO_COST: dict[str, Any] = {"checkpoint_s": 0.0, "checkpoint_bytes": 0, "checkpoint_hidden_s": 0.0}
"""Seconds that the run waited for checkpoints, their bytes, and the seconds of writing that it did not wait for."""


@dataclass(frozen=True)
class Pending:
    """A pending checkpoint; `written` gives its bytes and seconds, `activity` the work of a thread that writes it."""

    writing: CheckpointWriting
    on_complete: Callable[[], None]
    waited_s: float
    written: Future[tuple[int, float]]
    activity: Activity | None


class Saver:
    """One rank's part.  Collective of the world, except `due`, `look_at` and `take_cost`.

    `fingerprint`: all that fixes the order of the data.  `extra`: further entries of `state.json`.
    """

    def __init__(
        self, config: TrainConfig | SupervisedConfig, world: World, preemption: Preemption,
        fingerprint: Callable[[], dict[str, Any]], extra: Mapping[str, Any],
    ):  # fmt: skip
        self.rules, self.standard = config.checkpoint, best_standard(config)
        self.world, self.preemption = world, preemption
        self.run_dir = RunDirectory(config.run_dir)
        self.store = CheckpointStore(self.run_dir.checkpoints)
        self.settings, self.adapters = plain_settings(config), adapter_state(config)
        self.extra = dict(extra)
        self.stopping = False
        self.best: tuple[float, Position] | None = None  # the metric's value, and the checkpoint
        self.saved: Position | None = None
        self._fingerprint = fingerprint
        self._group = new_group(range(world.size), "checkpoints", backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Pending | None = None
        self._cost = NO_COST
        self._saved_at, self._overdue = time.monotonic(), False
        self._measured: tuple[int, float] | None = None

    @cached_property
    def data(self) -> dict[str, Any]:
        return self._fingerprint()

    def state(self, run: Saveable) -> dict[str, Any]:
        return {
            **run.state_dict(),
            **self.extra,
            "saved_at": time.time(),
            "data": self.data,
            "adapters": self.adapters,
            "best": None if self.best is None else [self.best[0], [self.best[1].step, self.best[1].clock]],
            "best_metric": self.standard and self.standard.metric,
            "config": self.settings,
        }

    def look_around(self) -> None:
        """Learn from all ranks whether one was asked to stop and whether the last checkpoint is complete."""
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
        every, standard = self.rules.every_steps, self.standard
        # Rewards come with every step and are noisy: the best of the checkpoints saved anyway is enough.
        best = self.rules.keep_best and standard is not None and standard.metric != REWARD and self._is_best(step)
        return self.stopping or self._overdue or best or bool(every and step % every == 0)

    def take_cost(self) -> dict[str, Any]:
        """Return what checkpoints have cost since the last call, as fields of a metrics line."""
        cost, self._cost = self._cost, NO_COST
        return cost

    def look_at(self, step: int, figures: Figures) -> None:
        if self.standard is not None and self.standard.metric in figures:
            self._measured = step, figures[self.standard.metric][0]

    def _is_best(self, step: int) -> bool:
        if self._measured is None or self._measured[0] != step or not math.isfinite(value := self._measured[1]):
            return False
        assert self.standard is not None
        return self.best is None or self.standard.gain(value, self.best[0]) > 0

    def load(self, run: Saveable, found: Found) -> None:
        state, models = found.state, run.models
        best = None if state["best"] is None else (state["best"][0], Position(*state["best"][1]))
        same = self.standard is not None and state["best_metric"] == self.standard.metric
        self.best = best if same and best is not None and self.store.folder(best[1]).is_dir() else None
        updates = updates_of(state, models)
        with waiting_for("models of the checkpoint", self.world.activity, waits=False), self._told("loading", run.note):
            load_models(found.folder / MODELS, models, updates)
        for name, model in models.items():
            model.resume_schedule(updates[name])

    def describe(self, found: Found) -> list[str]:
        return describe_changes(self.run_dir.path, found, self.settings, self.extra.get("sources", {}))

    def save(self, run: Saveable) -> None:
        """Write the run's state; return when it is complete or, if asynchronous, when the run may continue."""
        self.conclude()
        started, position = time.monotonic(), run.position
        last = self.stopping or position.clock >= 0
        run.finish_step()
        if position.clock < 0 and self._is_best(position.step):
            assert self._measured is not None
            self.best = self._measured[1], position
        activity = Activity() if self.rules.asynchronous and not last else None
        self._saved_at, self._overdue = time.monotonic(), False
        with waiting_for(f"checkpoint {position.name}", self.world.activity, waits=False), self._told("saving", run.note):
            snapshot = self.snapshot(run, copied=activity is not None)
            shown = activity or self.world.activity
            writing = CheckpointWriting(self.store, self._group, snapshot, self.rules.keep, run.note, shown)
            written: Future[tuple[int, float]] = Future()
            if activity is None:
                written.set_result(writing.run())
            else:
                written = self._thread.submit(writing.run)
        self._pending = Pending(writing, run.on_complete(), time.monotonic() - started, written, activity)
        if activity is None:
            self.conclude()
        if last:
            self.preemption.saved()

    def snapshot(self, run: Saveable, *, copied: bool) -> Snapshot:
        models, caches = gather_models(run.models, copied=copied), run.caches(copied=copied)
        texts = {} if run.note is None else {STATE: json.dumps(self.state(run), indent=1), **run.texts()}
        best = self.best[1] if self.rules.keep_best and self.best is not None else None
        return Snapshot(run.position, models, caches, texts, best)

    def finish(self, run: Saveable, save_weights: Callable[[Path], None]) -> None:
        with self.world.activity.doing("writing weights"):
            if self.rules.writes_weights:
                save_weights(self.run_dir.weights)
        if self.rules.saves_end and self.saved != run.position:
            try:
                self.save(run)
                self.conclude()
            except CheckpointError as error:  # the disk may be full now: only later continuation is lost
                if run.note is not None:
                    run.note(f"the run has ended, but cannot be given more steps later: {error}")
        if not (self.rules.writes_weights and self.rules.keep_best and self.best is not None):
            return
        with self.world.activity.doing("writing the best step's weights"):
            if self.best[1] != run.position:
                folder = self.store.folder(self.best[1])
                updates = updates_of(read_json((folder / STATE).read_text(encoding="utf-8")), run.models)
                what = "models of the best checkpoint"
                with waiting_for(what, self.world.activity, waits=False), self._told("loading", run.note):
                    load_models(folder / MODELS, run.models, updates)
            save_weights(self.run_dir.best)

    def conclude(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        started, at, position = time.monotonic(), self.world.activity, pending.writing.snapshot.position
        note, what = pending.writing.warn, f"checkpoint {position.name}"
        with waiting_for(what, at, waits=False), at.doing(pending.activity or "written"), self._told("saving", note):
            num_bytes, took_s = pending.written.result()
        waited_s = time.monotonic() - started
        hidden_s = 0.0 if pending.activity is None else max(0.0, took_s - waited_s)
        waited_s += pending.waited_s
        costs = zip(self._cost.items(), (waited_s, num_bytes, hidden_s), strict=True)
        self._cost = {name: before + cost for (name, before), cost in costs}
        self.saved = position
        pending.on_complete()
        if note is not None:
            hidden = f", {hidden_s:.1f} s of writing while the run continued" if hidden_s else ""
            note(f"checkpoint {position.name}: {num_bytes / 2**20:.1f} MB in {waited_s:.1f} s{hidden}")

    def _told(self, verb: str, note: Callable[[str], None] | None) -> AbstractContextManager[None]:
        """Report, on the rank that has `note`, that a call of the library continues."""
        return nullcontext() if note is None else while_silent(lambda: f"{verb} {self.world.activity.look().what}", note)


def updates_of(state: Mapping[str, Any], models: Iterable[str]) -> dict[str, int]:
    warmed = History.of(state.get("history", {})).warmed
    return {name: state["updates"] + (warmed if name == "critic" else 0) for name in models}
