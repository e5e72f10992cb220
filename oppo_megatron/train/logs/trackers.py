"""Experiment trackers through their own libraries, loaded only if configured."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, final

from oppo_megatron.config.run import LoggingConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.nesting import read_yaml
from oppo_megatron.rundir.directory import RunDirectory, write_text

Sink = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]
"""Functions that log a step's numbers, and close the tracker."""


@final
class Tracker:
    def __init__(self, sinks: Sequence[Sink]):
        self.sinks = list(sinks)

    def log(self, step: int, fields: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in _numbers(fields) if name != "step"}
        for log, _ in self.sinks:
            log(step, numbers)

    def close(self) -> None:
        for _, close in self.sinks:
            close()


def check_trackers(config: LoggingConfig) -> None:
    for tracker in config.trackers:
        _import(tracker.partition(":")[0])


def open_trackers(config: LoggingConfig, run_dir: str | os.PathLike[str]) -> Tracker:
    run, projects = RunDirectory(run_dir), [tracker.partition(":")[2] for tracker in config.trackers]
    return Tracker([_wandb(project, run) if project else _tensorboard(run) for project in projects])


def _tensorboard(run: RunDirectory) -> Sink:
    _import("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.tensorboard))

    def log(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(project: str, run: RunDirectory) -> Sink:
    """Begin a Weights & Biases run named after the run directory; a file keeps its id for resumed runs."""
    wandb = _import("wandb")
    run.wandb.mkdir(parents=True, exist_ok=True)
    id_file = run.wandb / "run_id"
    try:
        begun = wandb.init(
            project=project,
            name=run.path.resolve().name,
            dir=str(run.path),
            id=id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None,
            resume="allow",
            config=read_yaml(run.config.read_text(encoding="utf-8")) if run.config.exists() else {},
        )
    except wandb.Error as error:
        raise ConfigError(
            f"logging.trackers: wandb:{project}: Weights & Biases does not begin a run ({error}); log in (`wandb login`, or "
            "the variable WANDB_API_KEY), or set the variable WANDB_MODE to offline, or remove the entry"
        ) from error
    write_text(id_file, f"{begun.id}\n")
    return lambda step, numbers: begun.log(dict(numbers), step=step), begun.finish


def _numbers(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, Real) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def _import(name: str) -> Any:
    """Raise ConfigError if missing, as for a bare folder of its name (wandb creates one)."""
    try:
        module = importlib.import_module(name)
        if getattr(module, "__file__", None) is None and getattr(module, "__path__", None) is not None:
            raise ImportError(f"{name} is a folder here, not a package")
    except ImportError as error:
        raise ConfigError(
            f"logging.trackers names {name}, whose package cannot be imported here ({error}); install it (pip install {name}), "
            "or remove the entry"
        ) from error
    return module
