"""Experiment trackers, through their own libraries, loaded only where the configuration asks for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol

from oppo_megatron.config.run import LoggingConfig
from oppo_megatron.errors import ConfigError
from oppo_megatron.train.run_dir import RunDirectory


class Sink(Protocol):
    """One library that takes numbers."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Sends the numbers of each step to every sink; with no sinks it does nothing."""

    def __init__(self, sinks: Sequence[Sink]):
        self.sinks = list(sinks)

    def log(self, step: int, fields: Mapping[str, Any]) -> None:
        """Send the numeric fields of a step (not text, flags or lists); one of a mapping is named `field/key`."""
        numbers = {name: value for name, value in _numbers(fields) if name != "step"}
        for sink in self.sinks:
            sink.log(step, numbers)

    def close(self) -> None:
        """Let every sink write what it holds."""
        for sink in self.sinks:
            sink.close()


class TensorBoardSink:
    """Event files in `tensorboard/` of the run directory."""

    def __init__(self, run_dir: str | os.PathLike[str]):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard: true", "tensorboard", "logging.tensorboard to false") from error
        self._writer = SummaryWriter(str(RunDirectory(run_dir).tensorboard))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run named as the run directory, its own files inside it."""

    def __init__(self, project: str, run_dir: str | os.PathLike[str]):
        try:
            import wandb
        except ImportError as error:
            raise _missing(f"wandb_project: {project}", "wandb", "logging.wandb_project to null") from error
        path = RunDirectory(run_dir).path
        self._run = wandb.init(project=project, name=path.name, dir=str(path))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


def open_trackers(config: LoggingConfig, run_dir: str | os.PathLike[str]) -> Tracker:
    """Open the trackers that the configuration asks for.  Raises ConfigError where a library is not installed."""
    sinks: list[Sink] = []
    if config.tensorboard:
        sinks.append(TensorBoardSink(run_dir))
    if config.wandb_project is not None:
        sinks.append(WandbSink(config.wandb_project, run_dir))
    return Tracker(sinks)


def _numbers(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, Real) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def _missing(setting: str, package: str, off: str) -> ConfigError:
    return ConfigError(
        f"logging.{setting} needs the package {package}, which cannot be imported here; "
        f"install it (pip install {package}) or set {off}"
    )
