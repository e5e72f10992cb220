"""The Python API: `oppo train`, `generate`, `eval` and `plan` as functions (docs/extending.md).

A run with one rank stays in this process; more ranks are processes, as with the command.  Wrong input raises an OppoError.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from oppo_megatron.errors import EXIT_REQUEUE, ConfigError, OppoError, WorldError
from oppo_megatron.rundir.metrics_log import read_metrics

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainSettings
    from oppo_megatron.config.supervised import SupervisedConfig

Source: TypeAlias = Union[str, Path, Mapping[str, Any], "TrainSettings", "SupervisedConfig"]
"""A configuration: its file, its tree of settings, or the result of `load_config`."""

COMMAND_WORDS = re.compile(r"run `oppo (sft|rm|dpo|train) [^`]*`|`oppo [^`]*`|--([a-z][a-z-]*)|(?<!\S)-n\b")


@dataclass(frozen=True)
class Result:
    """An ended run.  Not `finished`: interrupted and saved; `train(..., resume=True)` continues it."""

    run_dir: Path
    finished: bool

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step, as in metrics.jsonl."""
        return read_metrics(self.run_dir / "metrics.jsonl")

    @property
    def weights(self) -> Path:
        """Folder of the final weights: `actor`, and `critic` if one was trained."""
        return self.run_dir / "weights"


def load_config(source: Source, overrides: Sequence[str] = (), *, kind: str = "train") -> TrainSettings | SupervisedConfig:
    """Read and check a configuration; `overrides` are `section.setting=value`.  Raises ConfigError."""
    import yaml

    from oppo_megatron.cli.load import load_settings
    from oppo_megatron.config.base import Section
    from oppo_megatron.config.load import plain_settings

    given, kind = _texts("overrides", overrides), _kind_of(source, kind)
    tree = plain_settings(source) if isinstance(source, Section) else source
    with tempfile.TemporaryDirectory() as folder, _words_of_python(file := f"{folder}/settings.yaml"):
        if not isinstance(tree, Mapping):
            return load_settings(kind, Path(_text("source", tree)), given)
        Path(file).write_text(yaml.safe_dump(json.loads(json.dumps(dict(tree), default=str))), encoding="utf-8")
        return load_settings(kind, Path(file), given)


def train(source: Source, overrides: Sequence[str] = (), *, kind: str = "train", resume: bool = False) -> Result:
    """Train as `oppo KIND` does.  Raises an OppoError for wrong input or a failed rank or plugin."""
    from oppo_megatron.cli.run import start

    settings = load_config(source, overrides, kind=kind)
    with _words_of_python():
        code = start(_kind_of(source, kind), settings.resumed() if resume else settings)
    if code not in (0, EXIT_REQUEUE):
        raise WorldError(f"the run ended with exit code {code}; its ranks' messages are above")
    return Result(Path(settings.run_dir), finished=code == 0)


def generate(directory: str | Path, prompts: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """Answer `prompts` in order, a dict per response.  `options`: of `oppo generate`, as `max_tokens=64, samples=4`."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"output": Path(folder) / "responses.jsonl", **options}
        _run("generate", {"directory": directory, "prompt": _texts("prompts", prompts), **given})
        return read_metrics(given["output"])


def evaluate(directories: Sequence[str | Path], data: str | Path, **options: Any) -> dict[str, Any]:
    """Judge policies; return the figures of `oppo eval --json`.  `options`: of `oppo eval`, as `verifier="arithmetic"`."""
    return _record("eval", {"directory": directories, "data": data, **options})


def plan(path: str | Path, cluster: str | Path, overrides: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """Search placements and layouts; return the record of `oppo plan search`."""
    return _record("plan", {"config": path, "overrides": overrides, "cluster": cluster, **options})


def _record(command: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run a command with `--out`; return its record there."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"out": folder, **options}
        _run(command, given)
        record: dict[str, Any] = json.loads((Path(given["out"]) / f"{command}.json").read_text(encoding="utf-8"))
        return record


def _run(command: str, options: Mapping[str, Any]) -> None:
    """Run a command, its arguments by name.  Raises TypeError for an unknown one."""
    module = importlib.import_module(f"oppo_megatron.cli.{'plan.search' if command == 'plan' else command}")
    parser = argparse.ArgumentParser(add_help=False)
    module.add_arguments(parser)
    known = {action.dest: action for action in parser._actions}
    if unknown := options.keys() - known.keys():
        raise TypeError(f"no argument is named {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    defaults = {name: action.default for name, action in known.items()}
    args = argparse.Namespace(**defaults | {name: _parsed(known[name], value) for name, value in options.items()})
    with _words_of_python():
        if module.run(args) != 0:
            raise WorldError(f"`oppo {command}` failed; the messages of its ranks are above")


@contextmanager
def _words_of_python(file: str = "\0") -> Iterator[None]:
    """Name arguments of functions in errors, not options of commands or a `file` of ours."""

    def argument(found: re.Match[str]) -> str:
        kind, flag = found.groups()
        return f"give kind={kind!r}" if kind else flag.replace("-", "_") if flag else "samples" if found[0] == "-n" else found[0]

    def said(parts: Iterable[Any]) -> list[str]:
        return [COMMAND_WORDS.sub(argument, str(part).replace(file, "source")) for part in parts]

    try:
        yield
    except OppoError as error:
        error.args = tuple(said(error.args))
        if isinstance(error, ConfigError):
            error.problems = said(error.problems)
        raise


def _kind_of(source: Source, kind: str) -> str:
    from oppo_megatron.config.describe import SUPERVISED
    from oppo_megatron.config.run import TrainSettings

    kinds: dict[str, type[Any]] = {"train": TrainSettings, **SUPERVISED}
    if kind not in kinds:
        raise ConfigError(f"kind is {kind!r:.60}; choose from {', '.join(kinds)}")
    return next((name for name, section in kinds.items() if isinstance(source, section)), kind)


def _parsed(action: argparse.Action, value: Any) -> Any:
    """A keyword's value as the parser would give it."""
    name, convert = action.dest, action.type if callable(action.type) else str
    if value is None or (action.nargs == 0 and isinstance(value, bool)):
        return value
    try:
        if isinstance(action, argparse._AppendAction) or action.nargs in ("*", "+"):
            return [convert(text) for text in _texts(name, value)]
        made = convert(_text(name, value))
        if action.nargs == 0 or (action.choices and made not in action.choices):
            raise ValueError(f"choose from {', '.join(action.choices or ('True', 'False'))}")
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{name} is {value!r:.60}: {error}") from error
    return made


def _texts(name: str, value: Any) -> list[str]:
    """Items of an argument that takes several; a single one counts as a list."""
    is_one = isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable)
    return [_text(name, each) for each in ([value] if is_one else value)]


def _text(name: str, value: Any) -> str:
    if isinstance(value, tuple) and value:  # as (median, sigma)
        return ",".join(_text(name, each) for each in value)
    if isinstance(value, bool) or not isinstance(value, (str, os.PathLike, Real)):
        raise ConfigError(f"{name} is {value!r:.60}, a {type(value).__name__}; give a text, a path or a number")
    return str(value)
