"""What a checkpoint is to hold, taken between two rounds, when every rank has recorded the same chunk and no message is
under way."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oppo_megatron.checkpoint.store import Position
from oppo_megatron.runtime.mcore.checkpoint import ModelShards, gather_models
from oppo_megatron.runtime.mcore.training import TrainedModel
from oppo_megatron.train.saving.caches import CacheContents, gather_caches
from oppo_megatron.train.saving.state import rollout_lines, trainer_state

if TYPE_CHECKING:
    from oppo_megatron.train.ppo import PPOTrainer

Best = tuple[float, Position]
"""A step's mean reward, and the checkpoint after it."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's part.  `state` and `rollouts` are the files' texts, on the rank that keeps the journal alone.

    `best`: the checkpoint that is kept beside the last ones.
    """

    position: Position
    models: ModelShards
    caches: CacheContents | None
    state: str | None
    rollouts: str | None
    best: Best | None


def take_snapshot(
    trainer: PPOTrainer, position: Position, run: Mapping[str, Any], best: Best | None, *, copied: bool
) -> Snapshot:
    """Collective of the world.  `copied`: into memory of its own, so that the run may go on while it is written.

    `run` is what tells the run: its `data` by `data_state`, its `config` and the `sources` of its functions by `telling.py`.
    """
    caches, state, rollouts = trainer.config.checkpoint.caches, None, None
    models = gather_models(trained_models(trainer), copied=copied)
    held = gather_caches(trainer.rounds, copied=copied) if caches else None
    if trainer.journal is not None:
        tree = trainer_state(trainer) | {
            "saved_at": time.time(),
            "caches": caches,
            "best": None if best is None else [best[0], [best[1].step, best[1].clock]],
            **run,
        }
        state = json.dumps(tree, indent=1)
        rollouts = "".join(rollout_lines(trainer.scheduler.buffer.rollouts))
    return Snapshot(position, models, held, state, rollouts, best)


def trained_models(trainer: PPOTrainer) -> dict[str, TrainedModel]:
    """Those of this rank, by role."""
    parts = {"actor": trainer.actor, "critic": trainer.critic}
    return {name: part.role.trained for name, part in parts.items() if part is not None}
