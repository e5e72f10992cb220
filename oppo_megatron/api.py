"""The Python API: `oppo train`, `generate`, `eval` and `plan` as functions (docs/extending.md).

    import oppo_megatron as oppo
    result = oppo.train("ppo.yaml", ["steps=20"])
    result.metrics[-1]["reward_mean"]

A run with one rank stays in this process; more ranks are processes, as with the command.  Wrong input raises an OppoError.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oppo_megatron.config.run import TrainSettings
    from oppo_megatron.config.supervised import SupervisedConfig

Source = str | Path | Mapping[str, Any]
"""A configuration: its file, or its tree of settings."""


@dataclass(frozen=True)
class Result:
    """An ended run.  Not `finished`: interrupted and saved; `train(..., resume=True)` continues it."""

    run_dir: Path
    finished: bool

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step, as in metrics.jsonl."""
        return _rows(self.run_dir / "metrics.jsonl")

    @property
    def weights(self) -> Path:
        """Folder of the final weights: `actor`, and `critic` if one was trained."""
        return self.run_dir / "weights"


def load_config(source: Source, overrides: Sequence[str] = (), *, kind: str = "train") -> TrainSettings | SupervisedConfig:
    """Read and check a configuration; `overrides` are `section.setting=value`.  Raises ConfigError."""
    import yaml

    from oppo_megatron.cli.load import load_settings

    if not isinstance(source, Mapping):
        return load_settings(kind, Path(source), overrides)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yaml"
        path.write_text(yaml.safe_dump(dict(source)), encoding="utf-8")
        return load_settings(kind, path, overrides)


def train(source: Source, overrides: Sequence[str] = (), *, kind: str = "train", resume: bool = False) -> Result:
    """Train as `oppo KIND` does.  Raises an OppoError for wrong input or a failed rank or plugin."""
    from oppo_megatron.cli.run import start
    from oppo_megatron.errors import EXIT_REQUEUE, WorldError

    settings = load_config(source, overrides, kind=kind)
    code = start(kind, settings.resumed() if resume else settings)
    if code not in (0, EXIT_REQUEUE):
        raise WorldError(f"the run ended with exit code {code}; its ranks' messages are above")
    return Result(Path(settings.run_dir), finished=code == 0)


def generate(directory: str | Path, prompts: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """Answer `prompts` in order, a dict per response.  `options`: of `oppo generate`, as `max_tokens=64, samples=4`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "responses.jsonl"
        _run("generate", [directory], {"prompt": list(prompts), "output": output, **options})
        return _rows(output)


def evaluate(directories: Sequence[str | Path], data: str | Path, **options: Any) -> dict[str, Any]:
    """Judge policies; return the figures of `oppo eval --json`.  `options`: of `oppo eval`, as `verifier="arithmetic"`."""
    return _record("eval", ["--data", data, *directories], options, "eval.json")


def plan(path: str | Path, cluster: str | Path, overrides: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """Search placements and layouts; return the record of `oppo plan search`."""
    given = {"overrides": list(overrides), **options}
    return _record("plan", ["search", path, "--cluster", cluster], given, "plan.json")


def _record(command: str, arguments: Sequence[str | Path], options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Run a command with `--out`; return its file `name`."""
    with tempfile.TemporaryDirectory() as folder:
        _run(command, arguments, {"out": Path(folder), **options})
        record: dict[str, Any] = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
        return record


def _run(command: str, arguments: Sequence[str | Path], options: Mapping[str, Any]) -> None:
    """Run a command.  Raises TypeError for an unknown option."""
    from oppo_megatron.cli.main import COMMANDS

    module = importlib.import_module(next(each.module for each in COMMANDS if each.name == command))
    parser = argparse.ArgumentParser(prog=command)
    module.add_arguments(parser)
    args = parser.parse_args([str(each) for each in arguments])
    if unknown := options.keys() - vars(args).keys():
        raise TypeError(f"`oppo {command}` has no option {', '.join(sorted(unknown))}; `oppo {command} --help` lists them")
    vars(args).update(options)
    if module.run(args) != 0:
        from oppo_megatron.errors import WorldError

        raise WorldError(f"`oppo {command}` failed; the messages of its ranks are above")


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:  # not `splitlines`: a text may hold characters that it takes for line ends
        return [json.loads(line) for line in file]
