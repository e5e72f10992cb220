"""When checkpoints are due, and what the run does about them.

With `checkpoint.asynchronous` the run waits for a snapshot only: a thread writes it, in agreement with the other ranks' threads
over a group of their own, and the ranks find at a later step's meeting that it is whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from oppo_megatron.checkpoint.store import CheckpointStore, Position
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.errors import CheckpointError
from oppo_megatron.overcommit.ahead import (
    Ahead,
    require_bounded_deferrals,
    require_prompts,
    require_resumable,
    require_work,
)
from oppo_megatron.runtime.activity import Activity
from oppo_megatron.runtime.mcore.checkpoint import load_models
from oppo_megatron.runtime.peers import waiting_for
from oppo_megatron.runtime.process_groups import new_group
from oppo_megatron.runtime.world import World
from oppo_megatron.train.run_dir import RunDirectory
from oppo_megatron.train.saving.caches import load_caches, require_sound_books
from oppo_megatron.train.saving.files import MODELS, cache_path
from oppo_megatron.train.saving.finding import Found
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.snapshot import Best, take_snapshot, trained_models
from oppo_megatron.train.saving.state import (
    adapter_state,
    data_state,
    layout_of,
    make_rollouts,
    require_same_adapters,
    require_same_data,
    restore_trainer,
)
from oppo_megatron.train.saving.telling import (
    config_state,
    read_config_state,
    source_state,
    tell_of_changes,
    tell_of_start,
)
from oppo_megatron.train.saving.writing import CheckpointWriting

if TYPE_CHECKING:
    from oppo_megatron.train.ppo import PPOTrainer


class Cost(NamedTuple):
    """Of a checkpoint: seconds that the run stood still for it, its bytes, and seconds of writing beside the run."""

    waited_s: float = 0.0
    num_bytes: int = 0
    hidden_s: float = 0.0

    def plus(self, other: Cost) -> Cost:
        return Cost(self.waited_s + other.waited_s, self.num_bytes + other.num_bytes, self.hidden_s + other.hidden_s)


@dataclass(frozen=True)
class Pending:
    """A checkpoint that is being written; the run was at `place` in the stream of prompts, and has waited `waited_s` for it.

    The future's are its bytes, and the seconds that a thread took to write it; `beside`: what that thread does, if there is one.
    """

    position: Position
    place: int
    waited_s: float
    written: Future[tuple[int, float]]
    beside: Activity | None


class Saver:
    """One rank's part.  Calls are collective of the world but for `take_cost` and `told_to_stop`."""

    def __init__(self, config: TrainConfig, world: World, prompts: PromptSet, preemption: Preemption):
        self.config, self.world, self.prompts, self.preemption = config, world, prompts, preemption
        self.store = CheckpointStore(RunDirectory(config.run_dir).checkpoints)
        self.stopping = False
        self.reward = 0.0
        self._group = new_group(range(world.size), "checkpoints", backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Pending | None = None
        self._told = {"config": config_state(config), "sources": source_state(config)}
        self._data: dict[str, Any] | None = None
        self._cost = Cost()
        self._best: Best | None = None
        self._saved: Position | None = None
        self._saved_at, self._overdue = time.monotonic(), False

    def told_to_stop(self, group: dist.ProcessGroup) -> bool:
        """Before a round, on the ranks of the actor alone: the chunk tells the others."""
        return self.preemption.agreed(group, self.world.activity)

    def meet(self, trainer: PPOTrainer, reward: float) -> None:
        """All ranks have met for a step's scores, of mean `reward`: was any told to stop, and is the last checkpoint whole?"""
        every_s = 60.0 * self.config.checkpoint.every_minutes
        overdue = bool(every_s) and time.monotonic() - self._saved_at >= every_s
        self.stopping, self._overdue = self.preemption.agreed_with(overdue, self.world.activity)
        self.reward = reward
        if self._pending is not None:
            written = torch.tensor([int(self._pending.written.done())])
            with waiting_for("ranks that write a checkpoint", self.world.activity):
                dist.all_reduce(written, op=dist.ReduceOp.MIN)
            if written.item():
                self.conclude(trainer)

    def due(self, step: int) -> bool:
        """After a step."""
        every = self.config.checkpoint.every_steps
        return self.stopping or self._overdue or bool(every and step % every == 0)

    def take_cost(self) -> Cost:
        """Of checkpoints, since the last call."""
        cost, self._cost = self._cost, Cost()
        return cost

    def save_end(self, trainer: PPOTrainer) -> None:
        """After the last step, behind the weights: a disk that is full now costs no more than the way on from here."""
        if not self.config.checkpoint.final or self._saved == Position(trainer.done):
            return
        try:
            self.save(trainer)
            self.conclude(trainer)
        except CheckpointError as error:
            if trainer.journal is not None:
                trainer.journal.progress.note(f"the run has ended, but cannot be given more steps later: {error}")

    def save(self, trainer: PPOTrainer) -> None:
        """Write the run's state between two rounds; when this returns the checkpoint is whole, or the run may go on.

        It is whole where the run is to stop with it, or `checkpoint.asynchronous` is off.
        """
        self.conclude(trainer)
        started = time.monotonic()
        trainer.settle()
        trainer.tracer.flush()
        trainer.spans.flush()
        trainer.rounds.executor.drain()
        trainer.memory.of_all_ranks()
        position = Position(trainer.done, -1 if trainer.phase is None else trainer.scheduler.buffer.clock)
        last = self.stopping or trainer.phase is not None  # the run is to stop with this one
        behind = self.config.checkpoint.asynchronous and not last
        self._saved_at, self._overdue = time.monotonic(), False
        with waiting_for(f"checkpoint {position.name}", self.world.activity, waits=False):
            writing = self._prepare(trainer, position, behind=behind)
            written = self._thread.submit(_timed, writing) if behind else _done((writing.run(), 0.0))
        beside = writing.activity if behind else None
        self._pending = Pending(position, trainer.scheduler.position, time.monotonic() - started, written, beside)
        if not behind:
            self.conclude(trainer)
        if last:
            self.preemption.saved()

    def conclude(self, trainer: PPOTrainer) -> None:
        """Wait for the checkpoint that is being written, if there is one.  Raises CheckpointError where it could not be."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        started = time.monotonic()
        at = self.world.activity
        with waiting_for(f"checkpoint {pending.position.name}", at, waits=False), at.doing(pending.beside or "written"):
            num_bytes, took_s = pending.written.result()
        waited_s = time.monotonic() - started
        cost = Cost(pending.waited_s + waited_s, num_bytes, max(0.0, took_s - waited_s))
        self._cost = self._cost.plus(cost)
        self._saved = pending.position
        trainer.guard.rollbacks.checkpoint = pending.position.name, pending.place
        if trainer.journal is not None:
            trainer.journal.saved(pending.position.name, *cost)

    def require_same_run(self, found: Found, left_out: Set[int]) -> Ahead:
        """What is left of a checkpoint's run, as it is configured now; `left_out` are positions in the stream of prompts.

        Raises CheckpointError where it has other prompts, another order of them, other adapters, had more steps or passes over
        the prompts, or has ended and has nothing left to train, and where rollouts in flight could not be trained within
        `overlap.max_deferrals`.
        """
        require_same_data(found.state["data"], self._data_now())
        require_same_adapters(found.state["adapters"], adapter_state(self.config))
        ahead = found.ahead(left_out)
        require_resumable(ahead.done, self.config.steps)
        num_rows, passes = len(self.prompts), self.config.passes
        most = None if passes is None else passes * num_rows
        require_prompts(ahead, most, num_rows)
        if RunDirectory(self.config.run_dir).finished:
            require_work(ahead, self.config.steps, most, self.config.rollout.batch_size)
        if ahead.done != self.config.steps:
            deferrals = [line["deferrals"] for line in found.held(left_out)]
            require_bounded_deferrals(deferrals, self.config.rollout.batch_size, self.config.overlap.max_deferrals)
        return ahead

    def describe(self, found: Found) -> list[str]:
        """From where the run goes on, and which settings are not what they were."""
        state, run = found.state, RunDirectory(self.config.run_dir)
        then = state.get("config") or read_config_state(run.config)
        told = tell_of_changes(then, self._told["config"], state.get("sources", {}), self._told["sources"])
        return [tell_of_start(run.path, found.folder.name, state["done"], state["saved_at"]), *told]

    def restore(self, trainer: PPOTrainer, found: Found) -> None:
        """Continue from a checkpoint.  Raises CheckpointError for other data, models or a damaged file."""
        state = found.state
        self.require_same_run(found, trainer.guard.rollbacks.left_out)
        self._best = None if state["best"] is None else (state["best"][0], Position(*state["best"][1]))
        updates = {name: state["updates"] for name in ("actor", "critic")}
        models = trained_models(trainer)
        with waiting_for("models of the checkpoint", self.world.activity, waits=False):
            load_models(found.folder / MODELS, models, updates)
        for model in models.values():
            model.resume_schedule(state["updates"])
        for part in (trainer.actor, trainer.critic):
            if part is not None:
                part.role.publish()
        stream = PromptStream(self.prompts, self.config.seed, shuffle=self.config.data.shuffle)
        rollbacks = trainer.guard.rollbacks
        held = make_rollouts(found.held(rollbacks.left_out), stream)
        restore_trainer(trainer, state, held)
        rollbacks.checkpoint = found.folder.name, found.position
        if len(held) == len(found.rollouts):
            self._restore_caches(trainer, found)
        buffer = trainer.scheduler.buffer
        lost = len(held) < len(found.rollouts)
        if trainer.phase is not None and (lost or len(buffer) < buffer.target):  # as where the batch is larger now
            trainer.rounds.admit(trainer.scheduler.refill())

    def _restore_caches(self, trainer: PPOTrainer, found: Found) -> None:
        """Where layout and options allow, then and now; else everything is prefilled again, with what each sequence has."""
        there = self.config.checkpoint.caches and found.state["caches"]
        if not there or found.state["layout"] != layout_of(trainer):
            return
        require_sound_books(found.state, trainer.scheduler.buffer.rollouts)
        planner, books = trainer.rounds.planner, found.state["books"]
        planner.actor.load_state_dict(books["actor"])
        for name, book in planner.scorers.items():
            book.load_state_dict(books[name])
        load_caches(cache_path(found.folder, self.world.rank), trainer.rounds)

    def _prepare(self, trainer: PPOTrainer, position: Position, *, behind: bool) -> CheckpointWriting:
        better = math.isfinite(self.reward) and (self._best is None or self.reward > self._best[0])
        if position.clock < 0 and better:
            self._best = self.reward, position
        checkpoint, journal = self.config.checkpoint, trainer.journal
        return CheckpointWriting(
            self.store,
            self._group,
            take_snapshot(trainer, position, self._told | {"data": self._data_now()}, self._best, copied=behind),
            keep=checkpoint.keep,
            keep_best=checkpoint.keep_best,
            warn=None if journal is None else journal.progress.note,
            activity=Activity() if behind else self.world.activity,
        )

    def _data_now(self) -> dict[str, Any]:
        if self._data is None:
            self._data = data_state(self.config, self.prompts)
        return self._data


def _timed(writing: CheckpointWriting) -> tuple[int, float]:
    """Bytes and seconds."""
    started = time.monotonic()
    return writing.run(), time.monotonic() - started


def _done(written: tuple[int, float]) -> Future[tuple[int, float]]:
    future: Future[tuple[int, float]] = Future()
    future.set_result(written)
    return future
