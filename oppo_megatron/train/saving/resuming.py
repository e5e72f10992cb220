"""The checkpoint that a run continues from: the last complete one, the same on every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from oppo_megatron.cluster.world import World
from oppo_megatron.config.run import SupervisedConfig, TrainConfig
from oppo_megatron.data.supervised_rows import Passed
from oppo_megatron.errors import CheckpointError
from oppo_megatron.mcore.weights.checkpoint_index import INDEX
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.overcommit.ahead import Ahead
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.manifest import OtherFormatError, find_damage, find_misfits, read_manifest
from oppo_megatron.train.saving.schema import PPOState, SupervisedState, read_lines, read_state
from oppo_megatron.train.saving.writing import CACHES, MODELS, ROLLOUTS, STATE

FoundT = TypeVar("FoundT")


@dataclass(frozen=True)
class Found:
    """A checkpoint to continue from; `rollouts` are the lines of those in the buffer (none in supervised training)."""

    folder: Path
    state: dict[str, Any]
    rollouts: list[dict[str, Any]]

    @property
    def position(self) -> int:
        """Position of the run in the stream of prompts."""
        return int(self.state["scheduler"]["position"])

    @property
    def passed(self) -> Passed:
        return Passed(self.state["done"], self.state["rows"])

    def held(self, left_out: Set[int]) -> list[dict[str, Any]]:
        """Return the rollouts that the run keeps; rollouts of prompts at the positions `left_out` are dropped."""
        return [line for line in self.rollouts if line["seq_id"] not in left_out]

    def ahead(self, left_out: Set[int]) -> Ahead:
        return Ahead(int(self.state["done"]), self.position, len(self.held(left_out)), left_out)


def find_checkpoint(config: TrainConfig | SupervisedConfig, world: World) -> Found | None:
    """Return the last complete checkpoint of the run directory if the run is to resume; errors as of `find_whole`."""
    if not config.checkpoint.resume:
        return None
    run = RunDirectory(config.run_dir)
    if isinstance(config, SupervisedConfig):
        return find_whole(
            run, world, (STATE,), lambda folder: Found(folder, read_state(folder / STATE, SupervisedState), [])
        )
    vocab_size = read_hf_config(config.actor)["vocab_size"]

    def read(folder: Path) -> Found:
        state = read_state(folder / STATE, PPOState)
        return Found(folder, state, read_lines(folder / ROLLOUTS, state, vocab_size))

    return find_whole(run, world, (STATE, ROLLOUTS), read)


def find_whole(run: RunDirectory, world: World, files: Sequence[str], read: Callable[[Path], FoundT]) -> FoundT | None:
    """Read the last complete checkpoint with `read`; the result is the same on every rank, None without checkpoints.

    A checkpoint is incomplete if it lacks one of `files` or `read` raises CheckpointError.  Every rank makes the call and checks
    a share of the files; damaged checkpoints are reported and renamed.  Raises CheckpointError if none is complete;
    OtherFormatError, with nothing renamed, for a checkpoint of another version.
    """
    store = CheckpointStore(run.checkpoints)
    if world.rank == 0:
        store.recover()
    found: list[Any] = [store.positions()]
    dist.broadcast_object_list(found, src=0)
    damages: list[tuple[Position, str]] = []
    for position in reversed(found[0]):
        damage = _damage(store.folder(position), world, files, read)
        if damage is None:
            for each, reason in damages if world.rank == 0 else ():
                text = f"checkpoint {each.name} is damaged ({reason}): continuing from {position.name}"
                print(text, file=sys.stderr, flush=True)
                store.set_aside(each)
            return read(store.folder(position))
        damages.append((position, damage))
    if damages:
        reasons = "; ".join(f"{position.name}: {damage}" for position, damage in damages)
        raise CheckpointError(
            f"{store.root}: none of its checkpoints is whole ({reasons}); restore one from a copy, or choose another run_dir"
        )
    return None


def _damage(folder: Path, world: World, files: Sequence[str], read: Callable[[Path], object]) -> str | None:
    """Return the fault of a checkpoint that any rank finds.  Raises OtherFormatError, on all ranks."""
    mine: str | OtherFormatError | None
    try:
        entries = read_manifest(folder)
        mine = find_misfits(folder, entries, (*files, f"{MODELS}/{INDEX}"), (MODELS, CACHES))
        mine = mine or find_damage(folder, entries, world.rank, world.size)
        if mine is None and world.rank == 0:  # an intact file may still not be the state of a run
            read(folder)
    except OtherFormatError as error:
        mine = error
    except CheckpointError as error:
        mine = str(error)
    found: list[str | OtherFormatError | None] = [None] * world.size
    dist.all_gather_object(found, mine)
    for damage in found:
        if isinstance(damage, OtherFormatError):
            raise damage
    return next((damage for damage in found if isinstance(damage, str)), None)
