"""Messages of a continued run: its checkpoint, and the changed settings."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from oppo_megatron.config.changes import changed_settings
from oppo_megatron.config.load import plain_settings
from oppo_megatron.config.run import SupervisedConfig, TrainConfig
from oppo_megatron.errors import DataError
from oppo_megatron.nesting import read_yaml


def config_state(config: TrainConfig | SupervisedConfig) -> dict[str, Any]:
    """What a checkpoint keeps of its run's settings, so that later ones can be compared: plain, every default filled in."""
    return plain_settings(config)


def source_state(config: TrainConfig) -> dict[str, str]:
    """SHA-256 of the file of each reward function, by entry point; of modules that have one."""
    digests = {}
    for part in config.rewards:
        path = _source(part.entry_point) if part.entry_point else None
        if part.entry_point and path is not None:
            digests[part.entry_point] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests


def tell_of_start(run_dir: Path, name: str, done: int, saved_at: float, now: float | None = None) -> str:
    """The line of a run that goes on from the checkpoint `name`, of `saved_at` (epoch seconds)."""
    ago = _ago((time.time() if now is None else now) - saved_at)
    return f"{run_dir}: continued from checkpoint {name}, saved {ago} ago, after {done} steps"


def tell_of_changes(
    then: Mapping[str, Any], now: Mapping[str, Any], sources: Mapping[str, str], sources_now: Mapping[str, str]
) -> list[str]:
    """A line for each setting, and each reward function's file, that is not what the checkpoint's run had."""
    lines = [f"changed: {change}" for change in changed_settings(then, now)]
    return lines + [
        f"changed: the file of {name}" for name, digest in sources_now.items() if sources.get(name, digest) != digest
    ]


def tell_of_nothing(run_dir: Path) -> str:
    return f"{run_dir} has no checkpoint to continue from: a new run begins"


def read_config_state(path: Path) -> dict[str, Any]:
    """The settings in a run's `config.yaml`, for checkpoints that hold none.  Raises DataError where they cannot be read."""
    try:
        tree = read_yaml(path.read_bytes())
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise DataError(f"{path}: not the configuration of a run ({error}); restore or remove it") from error
    return dict(tree) if isinstance(tree, dict) else {}


def _source(entry_point: str) -> Path | None:
    name = entry_point.rpartition(":")[0]
    if name.endswith(".py"):
        return Path(name) if Path(name).is_file() else None
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None  # loading the function reports its fault
    path = Path(spec.origin) if spec is not None and spec.origin else None
    return path if path is not None and path.is_file() else None


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"
