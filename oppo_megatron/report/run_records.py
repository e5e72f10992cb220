"""A run as its run directory shows it, ended or under way, and the split of its steps' time."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from oppo_megatron.errors import DataError
from oppo_megatron.nesting import read_json, read_yaml
from oppo_megatron.report.downtime import without_downtime
from oppo_megatron.rundir.directory import RUN_FORMAT, RunDirectory
from oppo_megatron.rundir.metrics_log import read_metrics
from oppo_megatron.rundir.trace import Span, read_spans

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """One run: `lines` of metrics.jsonl in step order; `summary` is None until the run has ended.

    `spans` are in seconds from the first, without the time in which the run did not run; where there are none,
    `no_spans` says why.
    """

    name: str
    run: RunDirectory
    lines: Sequence[Line]
    summary: Mapping[str, Any] | None
    config: Mapping[str, Any]
    spans: Sequence[Span] = field(repr=False, default=())
    no_spans: str = ""

    @property
    def kind(self) -> str:
        """`train`, or `supervised` for `oppo sft`, `rm`, `dpo` and `kto`."""
        supervised = any("loss" in line for line in self.lines[:1]) if self.lines else "rollout" not in self.config
        return "supervised" if supervised else "train"

    def column(self, key: str) -> tuple[list[int], list[float | None]]:
        """Steps and values of a field; one of a mapping is named `field.key`."""
        return [line["step"] for line in self.lines], [number(line, key) for line in self.lines]

    def has(self, key: str) -> bool:
        """Whether any step has the field."""
        return any(number(line, key) is not None for line in self.lines)


def number(line: Mapping[str, Any], key: str) -> float | None:
    """A field's number; None where the line has none that is finite."""
    value: Any = line
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def read_runs(paths: Sequence[str | os.PathLike[str]]) -> list[RunRecord]:
    """The records of run directories, under names that tell them apart.  Raises DataError."""
    resolved = [Path(path).resolve() for path in paths]
    for place, path in enumerate(resolved):
        if path in resolved[:place]:
            raise DataError(f"{paths[place]}: given twice; name each run directory once")
    for given in paths:
        check_run_directory(given)
    names = distinct_names(resolved)
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def read_run(path: str | os.PathLike[str], name: str | None = None, *, spans: bool = True) -> RunRecord:
    """The record of one run directory, which may be written to meanwhile.  Raises DataError."""
    check_run_directory(path)
    run = RunDirectory(path)
    lines = read_metrics(run.metrics) if run.metrics.exists() else []
    for place, line in enumerate(lines, start=1):
        if not isinstance(line.get("step"), int):
            raise DataError(
                f"{run.metrics}, line {place}: `step` is {line.get('step')!r}; each line needs the number of its step; "
                "repair or remove the line"
            )
    found, no_spans = _spans(run, lines) if spans else ([], "")
    return RunRecord(
        name or run.path.resolve().name, run, lines, _read_summary(run), _read_config(run), found, no_spans
    )


def check_run_directory(path: str | os.PathLike[str]) -> None:
    """Raises DataError where `path` is not what a run wrote, or was written by a later version of this package, and
    ConfigError where a file in it is a pipe, a socket or a device.
    """
    run = RunDirectory(path)
    if not run.path.is_dir():
        what = "a file" if run.path.exists() else "no such directory"
        raise DataError(f"{run.path}: {what}; give the run_dir of a run, the folder that holds its metrics.jsonl")
    if not run.metrics.exists() and not run.config.exists():
        inside = sorted(entry.parent.name for entry in run.path.glob("*/metrics.jsonl"))
        remedy = f"it holds the runs {', '.join(inside)}: name those" if inside else "give the run_dir of a run"
        raise DataError(f"{run.path}: no run directory, for it has neither metrics.jsonl nor config.yaml; {remedy}")
    run.require_regular()
    written = _read_json(run.hosts).get("format", RUN_FORMAT)
    if not isinstance(written, int) or written > RUN_FORMAT:
        raise DataError(
            f"{run.path}: its files have format {written!r} (hosts.json), and this version of oppo_megatron reads "
            f"formats up to {RUN_FORMAT}; use the version that made the run, or a later one"
        )


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths, of the same number of folders, that tell all of them apart."""
    for depth in range(1, 1 + max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("resolved paths differ")


def _spans(run: RunDirectory, lines: Sequence[Line]) -> tuple[list[Span], str]:
    try:
        spans = without_downtime(read_spans(run), lines)
    except DataError as error:
        return [], str(error)
    return spans, "" if spans else "no trace was recorded (run with logging.trace=true)"


def _read_summary(run: RunDirectory) -> dict[str, Any] | None:
    return _read_json(run.summary) if run.finished else None


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is not there or is none."""
    try:
        value = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_config(run: RunDirectory) -> dict[str, Any]:
    try:
        value = read_yaml(run.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


# field -> label, colour
STEP_PARTS = {
    "decode_s": ("decode", "decode"),
    "score_exposed_s": ("exposed scoring", "score"),
    "train_s": ("training: actor", "update"),
    "critic_exposed_s": ("training: critic, exposed", "critic"),
}
IDLE = "idle_s"
ALL_PARTS = {**STEP_PARTS, IDLE: ("idle and other", "idle")}


def split_step(line: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of `line["step_s"]` by part; they add up to it, or to more where the parts alone are more.

    Where a rank scores within decoding rounds, that scoring is taken off decoding, for it has a part of its own; so are
    the waits for the actor's pipeline, which are idle time.  Idle is the rest: those waits, waits for other ranks,
    planning, and writing of logs.
    """
    parts = {key: number(line, key) or 0.0 for key in STEP_PARTS}
    step_s = number(line, "step_s") or 0.0
    parts["decode_s"] = max(0.0, parts["decode_s"] - max(0.0, sum(parts.values()) - step_s))
    parts["decode_s"] *= 1.0 - (number(line, "bubble_share") or 0.0)
    return {**parts, IDLE: max(0.0, step_s - sum(parts.values()))}
