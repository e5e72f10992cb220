"""The content of a checkpoint, taken between two rounds, when every rank has recorded the same chunk and no message is
under way.

state.json       counters, controllers, books           models/   weights and optimizers of actor and critic
rollouts.jsonl   every rollout in the buffer            caches/   a file a rank, with `checkpoint.caches`
manifest.json    size and SHA-256 of all the others
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.mcore.weights.checkpoint import ModelShards, gather_models
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.train.saving.caches import CacheContents, gather_caches
from oppo_megatron.train.saving.saveable import Saveable
from oppo_megatron.train.saving.state import rollout_lines, run_state
from oppo_megatron.train.update import History

STATE, ROLLOUTS, MODELS, CACHES = "state.json", "rollouts.jsonl", "models", "caches"


def updates_of(state: Mapping[str, Any], models: Iterable[str]) -> dict[str, int]:
    """Optimizer steps of each model by a checkpoint's `state.json`; the critic's warm-up adds to its own."""
    warmed = History.of(state.get("history", {})).warmed
    return {name: state["updates"] + (warmed if name == "critic" else 0) for name in models}


def cache_path(folder: Path, rank: int) -> Path:
    """The file of a rank's caches in a checkpoint's folder."""
    return folder / CACHES / f"rank-{rank:05d}.safetensors"


Best = tuple[float, Position]
"""The score of a checkpoint (the higher the better: the mean reward of its step), and its position."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's part.  `texts`: what files hold, by name, on the rank that tells of the run; on the others none.

    `best`: the checkpoint that is kept beside the last ones.
    """

    position: Position
    models: ModelShards
    caches: CacheContents | None
    texts: Mapping[str, str]
    best: Best | None


def take_snapshot(
    run: Saveable, config: TrainConfig, told: Mapping[str, Any], best: Best | None, *, copied: bool
) -> Snapshot:
    """Collective of the world.  `copied`: into memory of its own, so that the run may go on while it is written.

    `told` identifies the run: its `data` by `data_state`, its `config` and the `sources` of its functions by `telling.py`.
    """
    caches, texts = config.checkpoint.caches, {}
    models = gather_models(run.models, copied=copied)
    held = gather_caches(run.rounds, copied=copied) if caches else None
    if run.note is not None:
        tree = run_state(run, config) | {
            "saved_at": time.time(),
            "caches": caches,
            "best": best_state(best),
            **told,
        }
        lines = "".join(rollout_lines(run.buffer.rollouts))
        texts = {STATE: json.dumps(tree, indent=1), ROLLOUTS: lines}
    return Snapshot(run.position, models, held, texts, best)


def best_state(best: Best | None) -> list[Any] | None:
    """The state, in plain JSON types."""
    return None if best is None else [best[0], [best[1].step, best[1].clock]]


def best_of(state: Mapping[str, Any]) -> Best | None:
    """What `best_state` made of it."""
    best = state["best"]
    return None if best is None else (best[0], Position(*best[1]))
