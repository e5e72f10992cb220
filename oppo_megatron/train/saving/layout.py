"""The files of a checkpoint.

state.json       counters, controllers, books           models/   weights and optimizers of actor and critic
rollouts.jsonl   every rollout in the buffer            caches/   a file a rank, where `checkpoint.caches`
manifest.json    size and SHA-256 of all the others
"""

from __future__ import annotations

from pathlib import Path

STATE, ROLLOUTS, MODELS, CACHES = "state.json", "rollouts.jsonl", "models", "caches"


def cache_path(folder: Path, rank: int) -> Path:
    """Of a rank's caches in a checkpoint's folder."""
    return folder / CACHES / f"rank-{rank:05d}.safetensors"
