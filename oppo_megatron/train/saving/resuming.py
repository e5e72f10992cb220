"""The checkpoint that a run continues from: the last one that is whole, on every rank the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from oppo_megatron.cluster.world import World
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.mcore.weights.checkpoint_index import INDEX
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.overcommit.ahead import Ahead
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.manifest import OtherFormatError, find_damage, find_misfits, read_manifest
from oppo_megatron.train.saving.snapshot import CACHES, MODELS, ROLLOUTS, STATE
from oppo_megatron.train.saving.state_schema import read_lines, read_state

FoundT = TypeVar("FoundT")


@dataclass(frozen=True)
class Found:
    """A checkpoint to continue from; `rollouts` are the lines of those that were in the buffer."""

    folder: Path
    state: dict[str, Any]
    rollouts: list[dict[str, Any]]

    @property
    def position(self) -> int:
        """Where the run was in the stream of prompts."""
        return int(self.state["scheduler"]["position"])

    def held(self, left_out: Set[int]) -> list[dict[str, Any]]:
        """The rollouts that the run goes on with; those of prompts at the positions `left_out` are given up."""
        return [line for line in self.rollouts if line["seq_id"] not in left_out]

    def ahead(self, left_out: Set[int]) -> Ahead:
        return Ahead(int(self.state["done"]), self.position, len(self.held(left_out)), left_out)


def find_checkpoint(config: TrainConfig, world: World) -> Found | None:
    """The last whole checkpoint of `oppo train`'s run directory; as `find_whole`."""
    vocab_size = read_hf_config(config.actor)["vocab_size"]

    def read(folder: Path) -> Found:
        state = read_state(folder / STATE)
        return Found(folder, state, read_lines(folder / ROLLOUTS, state, vocab_size))

    run = RunDirectory(config.run_dir)
    return find_whole(run, world, (STATE, ROLLOUTS), read) if config.checkpoint.resume else None


def find_whole(run: RunDirectory, world: World, files: Sequence[str], read: Callable[[Path], FoundT]) -> FoundT | None:
    """The last whole checkpoint of the run directory, the same on every rank; None where a new run is to begin.

    It has these `files`, and the result of `read` is returned; if `read` raises CheckpointError, the checkpoint is not whole.

    Every rank makes the call, and reads a share of the files.  Damaged ones are told of and set aside.  Raises
    CheckpointError where there are checkpoints, and none is whole; OtherFormatError, with nothing set aside, for one that
    another version wrote.
    """
    store = CheckpointStore(run.checkpoints)
    if world.rank == 0:
        store.recover()
    offered: list[Any] = [store.positions()]
    dist.broadcast_object_list(offered, src=0)
    damages: list[tuple[Position, str]] = []
    for position in reversed(offered[0]):
        damage = _damage(store.folder(position), world, files, read)
        if damage is None:
            _set_aside(store, damages, position, world)
            return read(store.folder(position))
        damages.append((position, damage))
    if damages:
        told = "; ".join(f"{position.name}: {damage}" for position, damage in damages)
        raise CheckpointError(
            f"{store.root}: none of its checkpoints is whole ({told}); restore one from a copy, or begin anew in another run_dir"
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


def _damage(folder: Path, world: World, files: Sequence[str], read: Callable[[Path], object]) -> str | None:
    """The fault of a checkpoint, as found by any rank.  Raises OtherFormatError, on all ranks."""
    mine: str | OtherFormatError | None
    try:
        entries = read_manifest(folder)
        mine = find_misfits(folder, entries, (*files, f"{MODELS}/{INDEX}"), (MODELS, CACHES))
        mine = mine or find_damage(folder, entries, world.rank, world.size)
        if mine is None and world.rank == 0:  # where what was written is no state of a run, the one before may be
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
