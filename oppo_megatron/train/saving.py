"""A run's checkpoints: when they are due, how all ranks write one, and how a run continues from one.

    state.json       counters, controllers, books           models/   weights and optimizers of actor and critic
    rollouts.jsonl   every rollout in the buffer            caches/   a file a rank, where `checkpoint.caches`
    manifest.json    size and SHA-256 of all the others

A checkpoint is taken between two rounds, when every rank has recorded the same chunk and no message is under way.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from oppo_megatron.checkpoint.manifest import (
    Entry,
    find_damage,
    find_misfits,
    list_files,
    read_manifest,
    seal,
    write_manifest,
)
from oppo_megatron.checkpoint.space import shortage, unwritten
from oppo_megatron.checkpoint.store import CheckpointStore, Position
from oppo_megatron.config.checkpoint import read_hf_config
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.data.prompts import PromptSet, PromptStream
from oppo_megatron.errors import CheckpointError
from oppo_megatron.runtime.mcore.checkpoint import load_models, save_models, size_bytes
from oppo_megatron.runtime.mcore.checkpoint_index import INDEX
from oppo_megatron.runtime.mcore.training import TrainedModel
from oppo_megatron.runtime.peers import waiting_for
from oppo_megatron.runtime.world import World
from oppo_megatron.train.caches import load_caches, require_sound_books, save_caches
from oppo_megatron.train.journal import Journal
from oppo_megatron.train.preemption import Preemption
from oppo_megatron.train.run_dir import RunDirectory
from oppo_megatron.train.state import (
    data_state,
    layout_of,
    read_rollouts,
    require_same_data,
    restore_trainer,
    rollout_lines,
    trainer_state,
)
from oppo_megatron.train.state_schema import read_lines, read_state

if TYPE_CHECKING:
    from oppo_megatron.train.ppo import PPOTrainer

STATE, ROLLOUTS, MODELS, CACHES = "state.json", "rollouts.jsonl", "models", "caches"
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Found:
    """A checkpoint to continue from."""

    folder: Path
    state: dict[str, Any]

    @property
    def position(self) -> int:
        """Where the run was in the stream of prompts."""
        return int(self.state["scheduler"]["position"])


class Saver:
    """One rank's part.  Calls are collective of the world but for `take_cost` and `told_to_stop`."""

    def __init__(self, config: TrainConfig, world: World, prompts: PromptSet, preemption: Preemption):
        self.config, self.world, self.prompts, self.preemption = config, world, prompts, preemption
        self.store = CheckpointStore(RunDirectory(config.run_dir).checkpoints)
        self.stopping = False
        self._data: dict[str, Any] | None = None
        self._cost = (0.0, 0)
        self._best: tuple[float, Position] | None = None
        self.reward = 0.0

    def told_to_stop(self, group: dist.ProcessGroup) -> bool:
        """Before a round, on the ranks of the actor alone: the chunk tells the others."""
        return self.preemption.agreed(group, self.world.activity)

    def meet(self, reward: float) -> None:
        """All ranks have met for a step's scores, of mean `reward`: was any of them told to stop?"""
        self.stopping, self.reward = self.preemption.agreed(None, self.world.activity), reward

    def due(self, step: int) -> bool:
        """After a step."""
        every = self.config.checkpoint.every_steps
        return self.stopping or bool(every and step % every == 0)

    def take_cost(self) -> tuple[float, int]:
        """Seconds and bytes of the checkpoint since the last call."""
        cost, self._cost = self._cost, (0.0, 0)
        return cost

    def save(self, trainer: PPOTrainer) -> None:
        """Write the run's state between two rounds; when this returns the checkpoint is whole."""
        started = time.time()
        trainer.settle()
        trainer.tracer.flush()
        trainer.spans.flush()
        trainer.rounds.executor.drain()
        trainer.memory.of_all_ranks()
        position = Position(trainer.done, -1 if trainer.phase is None else trainer.scheduler.buffer.clock)
        with waiting_for(f"checkpoint {position.name}", self.world.activity, waits=False):
            num_bytes = self._write(trainer, position)
        if self.stopping or trainer.phase is not None:  # else this save is not the one that the run is to stop with
            self.preemption.saved()
        self._cost = (time.time() - started, num_bytes)
        trainer.guard.rollbacks.checkpoint = position.name, trainer.scheduler.position
        if trainer.journal is not None:
            trainer.journal.saved(position.name, *self._cost)

    def restore(self, trainer: PPOTrainer, found: Found) -> None:
        """Continue from a checkpoint.  Raises CheckpointError for other data, models or a damaged file."""
        state = found.state
        require_same_data(state["data"], self._data_now())
        self._best = None if state["best"] is None else (state["best"][0], Position(*state["best"][1]))
        updates = {name: state["updates"] for name in ("actor", "critic")}
        models = _trained(trainer)
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
        path = found.folder / CACHES / _cache_name(self.world.rank)
        there = self.config.checkpoint.caches and found.state["caches"]
        if not there or found.state["layout"] != layout_of(trainer):
            return
        require_sound_books(found.state, trainer.scheduler.buffer.rollouts)
        planner, books = trainer.rounds.planner, found.state["books"]
        planner.actor.load_state_dict(books["actor"])
        for name, book in planner.scorers.items():
            book.load_state_dict(books[name])
        load_caches(path, trainer.rounds)

    def _write(self, trainer: PPOTrainer, position: Position) -> int:
        """All ranks' parts, one after the other; where one fails, all raise the same CheckpointError."""
        folder, journal, models = self.store.aside(position), trainer.journal, _trained(trainer)
        needed = sum(self._together(folder, 0, lambda: size_bytes(models)))
        try:
            self._together(folder, needed, lambda: self._begin(position, needed, journal))
            self._together(folder, needed, lambda: save_models(folder / MODELS, models))
            self._together(folder, needed, lambda: self._write_own(trainer, position, folder))
            shares = self._together(folder, needed, lambda: self._seal(folder))
            entries = {name: entry for share in shares for name, entry in share.items()}
            self._together(folder, needed, lambda: self._commit(position, entries, journal))
        except CheckpointError:
            if journal is not None:  # no rank writes any more
                self.store.abandon(position)
            raise
        return sum(entry.size_bytes for entry in entries.values())

    def _together(self, folder: Path, needed: int, work: Callable[[], ResultT]) -> list[ResultT]:
        """What every rank's `work` gave, by rank.  CheckpointError on all ranks where it could not be done on one."""
        mine: tuple[ResultT | None, str | None]
        try:
            mine = work(), None
        except (OSError, SafetensorError, CheckpointError) as error:
            mine = None, getattr(error, "strerror", None) or str(error)
        answers: list[Any] = [None] * self.world.size
        with self.world.activity.doing("all ranks' parts", waits=True):
            dist.all_gather_object(answers, mine)
        for rank, (_, failure) in enumerate(answers):
            if failure is not None:
                last = next((whole.name for whole in reversed(self.store.positions())), None)
                raise unwritten(folder, f"rank {rank}: {failure}", needed, last)
        return [result for result, _ in answers]

    def _begin(self, position: Position, needed: int, journal: Journal | None) -> None:
        """The folder, made by one rank; it says where the disk may not hold `needed` bytes more."""
        if journal is not None:
            folder = self.store.begin(position)
            (folder / MODELS).mkdir()
            (folder / CACHES).mkdir()
            if warning := shortage(self.store.root, needed):
                journal.progress.note(warning)

    def _write_own(self, trainer: PPOTrainer, position: Position, folder: Path) -> None:
        """This rank's caches, and the state from the rank that keeps the journal."""
        if self.config.checkpoint.caches:
            save_caches(folder / CACHES / _cache_name(self.world.rank), trainer.rounds)
        if trainer.journal is not None:
            self._write_state(trainer, position, folder)

    def _commit(self, position: Position, entries: dict[str, Entry], journal: Journal | None) -> None:
        if journal is None:
            return
        write_manifest(self.store.aside(position), entries)
        self.store.commit(position)
        checkpoint = self.config.checkpoint
        self.store.prune(checkpoint.keep, self._best[1] if checkpoint.keep_best and self._best else None)

    def _write_state(self, trainer: PPOTrainer, position: Position, folder: Path) -> None:
        better = math.isfinite(self.reward) and (self._best is None or self.reward > self._best[0])
        if position.clock < 0 and better:
            self._best = self.reward, position
        state = trainer_state(trainer) | {
            "saved_at": time.time(),
            "caches": self.config.checkpoint.caches,
            "data": self._data_now(),
            "best": None if self._best is None else [self._best[0], [self._best[1].step, self._best[1].clock]],
        }
        (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        with (folder / ROLLOUTS).open("w", encoding="utf-8") as file:
            file.writelines(rollout_lines(trainer.scheduler.buffer.rollouts))

    def _seal(self, folder: Path) -> dict[str, Entry]:
        """All files on the disk, each rank's share of them described by it."""
        return seal(folder, list_files(folder)[self.world.rank :: self.world.size])

    def _data_now(self) -> dict[str, Any]:
        if self._data is None:
            self._data = data_state(self.config, self.prompts)
        return self._data


def find_checkpoint(config: TrainConfig, world: World) -> Found | None:
    """The last whole checkpoint of the run directory, the same on every rank; None where a new run is to begin.

    Every rank makes the call, and reads a share of the files.  Damaged ones are told of and set aside.  Raises
    CheckpointError where there are checkpoints, and none is whole.
    """
    if not config.checkpoint.resume:
        return None
    store = CheckpointStore(RunDirectory(config.run_dir).checkpoints)
    if world.rank == 0:
        store.recover()
    offered: list[Any] = [store.positions()]
    dist.broadcast_object_list(offered, src=0)
    damages: list[tuple[Position, str]] = []
    vocab_size = read_hf_config(config.actor)["vocab_size"]
    for position in reversed(offered[0]):
        damage = _damage(store.folder(position), world, vocab_size)
        if damage is None:
            _set_aside(store, damages, position, world)
            folder = store.folder(position)
            return Found(folder, read_state(folder / STATE))
        damages.append((position, damage))
    if damages:
        told = "; ".join(f"{position.name}: {damage}" for position, damage in damages)
        raise CheckpointError(
            f"{store.root}: none of its checkpoints is whole ({told}); restore one from a copy, or remove them and begin anew"
        )
    return None


def _set_aside(store: CheckpointStore, damages: list[tuple[Position, str]], chosen: Position, world: World) -> None:
    if world.rank == 0:
        for position, damage in damages:
            print(
                f"checkpoint {position.name} is damaged ({damage}): continuing from {chosen.name}",
                file=sys.stderr,
                flush=True,
            )
            store.set_aside(position)


def _damage(folder: Path, world: World, vocab_size: int) -> str | None:
    """What is wrong with a checkpoint, as found by any rank."""
    try:
        entries = read_manifest(folder)
        mine = find_misfits(folder, entries, (STATE, ROLLOUTS, f"{MODELS}/{INDEX}"), (MODELS, CACHES))
        mine = mine or find_damage(folder, entries, world.rank, world.size)
        if mine is None and world.rank == 0:  # where what was written is no state of a run, the one before may be
            read_lines(folder / ROLLOUTS, read_state(folder / STATE), vocab_size)
    except CheckpointError as error:
        mine = str(error)
    found: list[str | None] = [None] * world.size
    dist.all_gather_object(found, mine)
    return next((damage for damage in found if damage is not None), None)


def _trained(trainer: PPOTrainer) -> dict[str, TrainedModel]:
    parts = {"actor": trainer.actor, "critic": trainer.critic}
    return {name: part.role.trained for name, part in parts.items() if part is not None}


def _cache_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
