"""The files of a checkpoint.

state.json       counters, controllers, books           models/   weights and optimizers of actor and critic
rollouts.jsonl   every rollout in the buffer            caches/   a file a rank, where `checkpoint.caches`
manifest.json    size and SHA-256 of all the others
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STATE, ROLLOUTS, MODELS, CACHES = "state.json", "rollouts.jsonl", "models", "caches"


def updates_of(state: Mapping[str, Any], models: Iterable[str]) -> dict[str, int]:
    """Optimizer steps of each of the models, of a checkpoint's `state.json`; the critic's warm-up is its own."""
    warmed = state.get("history", {}).get("warmed", 0)
    return {name: state["updates"] + (warmed if name == "critic" else 0) for name in models}


def cache_path(folder: Path, rank: int) -> Path:
    """Of a rank's caches in a checkpoint's folder."""
    return folder / CACHES / f"rank-{rank:05d}.safetensors"
