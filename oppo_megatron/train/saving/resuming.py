"""The checkpoint that a run continues from: the last complete one, the same on every rank."""

from __future__ import annotations

import sys
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from oppo_megatron.cluster.world import World
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.config.supervised import SupervisedConfig
from oppo_megatron.data.supervised_rows import Passed
from oppo_megatron.errors import CheckpointError
from oppo_megatron.mcore.weights.dist_source import INDEX
from oppo_megatron.modeldir.headers import read_hf_config
from oppo_megatron.overcommit.ahead import Ahead
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.manifest import OtherFormatError, find_damage, find_misfits, read_manifest
from oppo_megatron.train.saving.schema import PPO_STATE, SUPERVISED_STATE, read_lines, read_state
from oppo_megatron.train.saving.writing import CACHES, MODELS, ROLLOUTS, STATE


@dataclass(frozen=True)
class Found:
    folder: Path
    state: dict[str, Any]
    rollouts: list[dict[str, Any]]

    @property
    def position(self) -> int:
        return int(self.state["scheduler"]["position"])

    @property
    def passed(self) -> Passed:
        return Passed(self.state["done"], self.state["rows"])

    def held(self, left_out: Set[int]) -> list[dict[str, Any]]:
        return [line for line in self.rollouts if line["seq_id"] not in left_out]

    def ahead(self, left_out: Set[int]) -> Ahead:
        return Ahead(int(self.state["done"]), self.position, len(self.held(left_out)), left_out)


def find_checkpoint(config: TrainConfig | SupervisedConfig, world: World) -> Found | None:
    """Return the last complete checkpoint, the same on every rank; None unless the run is to resume.

    Collective.  Damaged checkpoints are reported and renamed.  Raises CheckpointError if none is complete, OtherFormatError
    (nothing renamed) for another version's.
    """
    if not config.checkpoint.resume:
        return None
    store = CheckpointStore(RunDirectory(config.run_dir).checkpoints)
    vocab_size = read_hf_config(config.actor)["vocab_size"] if isinstance(config, TrainConfig) else None
    if world.rank == 0:
        store.recover()
    found: list[Any] = [store.positions()]
    dist.broadcast_object_list(found, src=0)
    damages: list[tuple[Position, str]] = []
    for position in reversed(found[0]):
        damage = _damage(store.folder(position), world, vocab_size)
        if damage is None:
            for each, reason in damages if world.rank == 0 else ():
                text = f"checkpoint {each.name} is damaged ({reason}): continuing from {position.name}"
                print(text, file=sys.stderr, flush=True)
                store.set_aside(each)
            return _read(store.folder(position), vocab_size)
        damages.append((position, damage))
    if damages:
        reasons = "; ".join(f"{position.name}: {damage}" for position, damage in damages)
        raise CheckpointError(
            f"{store.root}: none of its checkpoints is whole ({reasons}); restore one from a copy, or choose another run_dir"
        )
    return None


def _read(folder: Path, vocab_size: int | None) -> Found:
    if vocab_size is None:
        return Found(folder, read_state(folder / STATE, SUPERVISED_STATE), [])
    state = read_state(folder / STATE, PPO_STATE)
    return Found(folder, state, read_lines(folder / ROLLOUTS, state, vocab_size))


def _damage(folder: Path, world: World, vocab_size: int | None) -> str | None:
    mine: str | OtherFormatError | None
    files = (STATE, f"{MODELS}/{INDEX}", *(() if vocab_size is None else (ROLLOUTS,)))
    try:
        entries = read_manifest(folder)
        mine = find_misfits(folder, entries, files, (MODELS, CACHES))
        mine = mine or find_damage(folder, entries, world.rank, world.size)
        if mine is None and world.rank == 0:  # an intact file may still not be the state of a run
            _read(folder, vocab_size)
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
