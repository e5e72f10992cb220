"""When checkpoints are due, and what the run does about them.

With `checkpoint.asynchronous` the run waits for a snapshot only: a thread writes it, in agreement with the other ranks' threads
over a group of their own, and the ranks find at a later step's meeting that it is whole.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from oppo_megatron.checkpoint.store import CheckpointStore, Position
from oppo_megatron.config.checkpoint import read_hf_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.runtime.activity import Activity
from oppo_megatron.runtime.mcore.checkpoint import load_models
from oppo_megatron.runtime.peers import waiting_for
from oppo_megatron.runtime.process_groups import new_group
from oppo_megatron.runtime.world import World
from oppo_megatron.train.run_dir import RunDirectory
from oppo_megatron.train.saving.caches import load_caches, require_sound_books
from oppo_megatron.train.saving.files import MODELS, ROLLOUTS, cache_path
from oppo_megatron.train.saving.finding import Found
from oppo_megatron.train.saving.preemption import Preemption
from oppo_megatron.train.saving.snapshot import Best, take_snapshot, trained_models
from oppo_megatron.train.saving.state import (
    adapter_state,
    data_state,
    layout_of,
    read_rollouts,
    require_same_adapters,
    require_same_data,
    restore_trainer,
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
        self._data: dict[str, Any] | None = None
        self._cost = Cost()
        self._best: Best | None = None

    def told_to_stop(self, group: dist.ProcessGroup) -> bool:
        """Before a round, on the ranks of the actor alone: the chunk tells the others."""
        return self.preemption.agreed(group, self.world.activity)

    def meet(self, trainer: PPOTrainer, reward: float) -> None:
        """All ranks have met for a step's scores, of mean `reward`: was any told to stop, and is the last checkpoint whole?"""
        self.stopping, self.reward = self.preemption.agreed(None, self.world.activity), reward
        if self._pending is not None:
            written = torch.tensor([int(self._pending.written.done())])
            with waiting_for("ranks that write a checkpoint", self.world.activity):
                dist.all_reduce(written, op=dist.ReduceOp.MIN)
            if written.item():
                self.conclude(trainer)

    def due(self, step: int) -> bool:
        """After a step."""
        every = self.config.checkpoint.every_steps
        return self.stopping or bool(every and step % every == 0)

    def take_cost(self) -> Cost:
        """Of checkpoints, since the last call."""
        cost, self._cost = self._cost, Cost()
        return cost

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
        trainer.guard.rollbacks.checkpoint = pending.position.name, pending.place
        if trainer.journal is not None:
            trainer.journal.saved(pending.position.name, *cost)

    def require_same_run(self, found: Found) -> None:
        """Raises CheckpointError where a checkpoint's run has other prompts, another order of them, or other adapters."""
        require_same_data(found.state["data"], self._data_now())
        require_same_adapters(found.state["adapters"], adapter_state(self.config))

    def restore(self, trainer: PPOTrainer, found: Found) -> None:
        """Continue from a checkpoint.  Raises CheckpointError for other data, models or a damaged file."""
        state = found.state
        self.require_same_run(found)
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
        vocab_size = read_hf_config(self.config.actor)["vocab_size"]
        rollouts = read_rollouts(found.folder / ROLLOUTS, state, vocab_size, stream)
        rollbacks = trainer.guard.rollbacks
        held = [rollout for rollout in rollouts if rollout.seq_id not in rollbacks.left_out]
        restore_trainer(trainer, state, held)
        rollbacks.checkpoint = found.folder.name, found.position
        if len(held) == len(rollouts):
            self._restore_caches(trainer, found)
        elif trainer.phase is not None:  # the step under way has lost rollouts, and may have too few left
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
            take_snapshot(trainer, position, self._data_now(), self._best, copied=behind),
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
