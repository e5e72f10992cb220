"""The Python API (docs/extending.md): commands as functions.  Wrong input raises an OppoError."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    from oppo_megatron.sim.flow.dataflow import Dataflow

Source: TypeAlias = Union[str, Path, Mapping[str, Any], "TrainSettings", "SupervisedConfig"]
"""A configuration: its file, its tree of settings, or the result of `load_config`."""

COMMAND_WORDS = re.compile(r"run `oppo (sft|rm|dpo|train) [^`]*`|`oppo [^`]*`|(--[a-z][a-z-]*)")


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
    from oppo_megatron.cli.load import load_settings

    given, kind = _each("overrides", overrides), _kind_of(source, kind)
    with _as_file(source) as file:
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
        _run("generate", {"directory": directory, "prompt": _each("prompts", prompts), **given})
        return read_metrics(given["output"])


def evaluate(directories: Sequence[str | Path], data: str | Path, **options: Any) -> dict[str, Any]:
    """Judge policies; return the figures of `oppo eval --json`.  `options`: of `oppo eval`, as `verifier="arithmetic"`."""
    return _record("eval", {"directory": directories, "data": data, **options})


def plan(source: Source, cluster: str | Path, overrides: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """Search placements and layouts; return the record of `oppo plan search`."""
    with _as_file(source) as file:
        return _record("plan", {"config": file, "overrides": overrides, "cluster": cluster, **options})


def plan_flow(flow: Source | Dataflow, cluster: str | Path, overrides: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """Place the calls of a dataflow; return the record of `oppo plan flow`."""
    with _as_file(flow) as file:
        return _record("flow", {"config": file, "overrides": overrides, "cluster": cluster, **options})


def _record(command: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run a command with `--out`; return its record there."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"out": folder, **options}
        _run(command, given)
        record: dict[str, Any] = json.loads((Path(given["out"]) / f"{command}.json").read_text(encoding="utf-8"))
        return record


def _run(command: str, options: Mapping[str, Any]) -> None:
    """Run a command, its arguments by name.  Raises TypeError for an unknown one."""
    name = {"plan": "plan.search", "flow": "plan.flow"}.get(command, command)
    module = importlib.import_module(f"oppo_megatron.cli.{name}")
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
def _as_file(source: Source | Dataflow) -> Iterator[str]:
    """Yield the name of the configuration's file, a temporary one for settings; errors call it `source`."""
    import yaml

    from oppo_megatron.config.base import Section
    from oppo_megatron.config.load import plain_settings

    tree = plain_settings(source) if isinstance(source, Section) else source
    with tempfile.TemporaryDirectory() as folder, _words_of_python(file := f"{folder}/settings.yaml"):
        if isinstance(tree, Mapping):
            Path(file).write_text(yaml.safe_dump(json.loads(json.dumps(dict(tree), default=str))), encoding="utf-8")
        yield file if isinstance(tree, Mapping) else _each("source", tree, many=False)[0]


@contextmanager
def _words_of_python(file: str = "\0") -> Iterator[None]:
    """Name arguments of functions in errors, not options of commands or a `file` of ours."""
    try:
        yield
    except OppoError as error:
        error.args = tuple(COMMAND_WORDS.sub(_argument, str(part).replace(file, "source")) for part in error.args)
        raise


def _argument(found: re.Match[str]) -> str:
    kind, option = found.groups()
    return f"give kind={kind!r}" if kind else found[0] if option is None else option.strip("-").replace("-", "_")


def _kind_of(source: Source, kind: str) -> str:
    from oppo_megatron.config.describe import COMMANDS

    kinds = {name: section for name, section in COMMANDS.items() if name != "serve"}
    if kind not in kinds:
        raise ConfigError(f"kind is {kind!r:.60}; choose from {', '.join(kinds)}")
    return next((name for name, section in kinds.items() if isinstance(source, section)), kind)


def _parsed(action: argparse.Action, value: Any) -> Any:
    """A keyword's value as the parser would give it."""
    if value is None or (action.nargs == 0 and isinstance(value, bool)):
        return value

    def convert(text: str) -> Any:
        made = action.type(text) if callable(action.type) else text
        if action.nargs == 0 or (action.choices and made not in action.choices):
            raise ValueError(f"choose from {', '.join(action.choices or ('True', 'False'))}")
        return made

    many = isinstance(action, argparse._AppendAction) or action.nargs in ("*", "+")
    made = _each(action.dest, value, convert, many=many)
    return made if many else made[0]


def _each(name: str, value: Any, convert: Callable[[str], Any] = str, *, many: bool = True) -> list[Any]:
    """Converted items; a text or path counts as a list of one."""
    is_one = not many or isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable)
    try:
        return [convert(_text(each)) for each in ([value] if is_one else value)]
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        raise ConfigError(f"{name} is {value!r:.60}: {error}") from error


def _text(value: Any) -> str:
    if isinstance(value, tuple) and value:  # as (median, sigma)
        return ",".join(map(_text, value))
    if isinstance(value, bool) or not isinstance(value, (str, os.PathLike, Real)):
        raise TypeError(f"type {type(value).__name__} is none of text, path and number")
    return str(value)
