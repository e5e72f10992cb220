"""The paths of a run's files (docs/metrics.md), written so that a crash leaves no half-written file."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from itertools import count
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import IO, Any, Literal

import yaml

from oppo_megatron.config.paths import irregular_path
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.nesting import read_json, read_yaml
from oppo_megatron.rundir.checkpoints import CheckpointStore
from oppo_megatron.rundir.disk import HELD_WAIT_S, free_bytes, held, megabytes

RUN_FORMAT = 1
"""Format of a run's files, recorded in `hosts.json`; raised when earlier files would be misread."""

PRODUCTS = (
    "config.yaml", "hosts.json", "metrics.jsonl", "rollouts.jsonl", "trace.json", "summary.json", "quarantine.jsonl",
    "weights", "best", "tensorboard", "wandb", "schedules.txt", "costs.json", "rejected", "rollbacks.jsonl",
    "checkpoints", "installs.jsonl",
)  # fmt: skip
RESOLVED = frozenset({"run_dir", "logging", "checkpoint", "preempt_deadline_s", "stall_deadline_s"})
"""Sections that a run's `config.yaml` always has, and a user's own rarely."""


class RunDirectory:
    """Paths of one run; the disk is untouched until `prepare`."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.date = self.path / "date.txt"
        self.hosts = self.path / "hosts.json"
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts.jsonl"
        self.trace = self.path / "trace.json"
        self.schedules = self.path / "schedules.txt"
        self.costs = self.path / "costs.json"
        self.summary = self.path / "summary.json"
        self.quarantine = self.path / "quarantine.jsonl"
        self.weights = self.path / "weights"
        self.best = self.path / "best"
        self.tensorboard = self.path / "tensorboard"
        self.wandb = self.path / "wandb"
        self.rejected = self.path / "rejected"
        self.rollbacks = self.path / "rollbacks.jsonl"
        self.reference = self.path / "reference.safetensors"
        self.placement = self.path / "placement.json"
        self.placement_runs = self.path / "placement"
        self.checkpoints = self.path / "checkpoints"
        self.stacks = self.path / "stacks"
        self.holder = self.path / "holder.json"
        self.installs = self.path / "installs.jsonl"

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def finished(self) -> bool:
        """True if the last file, `summary.json`, exists."""
        return self.summary.exists()

    def rank_trace(self, rank: int) -> Path:
        return self.path / f"trace.rank{rank}.jsonl"

    def rank_traces(self) -> list[Path]:
        return sorted(self.path.glob("trace.rank*.jsonl"), key=lambda path: int(path.name.split(".")[1][len("rank") :]))

    def require_unfinished(self) -> None:
        if self.finished:
            raise ConfigError(
                f"run_dir: {self.path} holds a finished run (it has a summary.json), which is not written over; "
                "choose another run_dir, or remove this one"
            )

    def require_regular(self) -> None:
        """Raise ConfigError for pipes, sockets and devices."""
        remedy = "remove it, or put what the run wrote in its place"
        found = [irregular_path("the run's file", self.path / name, remedy) for name in PRODUCTS]
        if problems := [problem for problem in found if problem is not None]:
            raise ConfigError(problems)

    def require_own(self) -> None:
        """Raise ConfigError for others' files that a run would remove."""
        self.require_regular()
        signs = (self.hosts, self.metrics, self.summary)
        if any(sign.exists() for sign in signs) or self.has_checkpoints or RESOLVED <= self.settings().keys():
            return
        if others := [name for name in PRODUCTS if (self.path / name).exists()]:
            raise ConfigError(
                f"run_dir: {self.path} holds {', '.join(others)}, which no run wrote, and a run would write over; choose a "
                "folder of the run's own, as in run_dir=runs/first"
            )

    def require_apart(self, named: Iterable[tuple[str, Path]]) -> None:
        """Raise ConfigError if a named path is among the run's files."""
        products = {(self.path / name).resolve() for name in PRODUCTS}
        problems = [
            f"{key} is {path}, one of the files that the run in {self.path} writes, and moves or removes when it begins or "
            "continues; name what the run began with to continue it, or choose another run_dir to start from this"
            for key, path in named
            if products & {path.resolve(), *path.resolve().parents}
        ]
        if problems:
            raise ConfigError(problems)

    def settings(self) -> dict[str, Any]:
        """`config.yaml`, unchecked; empty if unreadable."""
        try:
            tree = read_yaml(self.config.read_bytes()) if self.config.is_file() else None
        except (yaml.YAMLError, ValueError):
            return {}
        return tree if isinstance(tree, dict) else {}

    def last_saved(self) -> tuple[str, int] | None:
        store = CheckpointStore(self.checkpoints)
        folders = [store.folder(position) for position in store.positions()]
        times = [(folder.stat().st_mtime_ns, folder.name) for folder in folders if folder.exists()]
        return max(times)[::-1] if times else None

    @property
    def has_checkpoints(self) -> bool:
        return bool(CheckpointStore(self.checkpoints).positions())

    def require_no_checkpoints(self) -> None:
        if self.has_checkpoints:
            raise ConfigError(
                f"run_dir: {self.path} holds the checkpoints of a run that did not finish; continue it with --resume, "
                "choose another run_dir, or remove this one"
            )

    def require_space(self, needed: int) -> None:
        if (free := free_bytes(self.path)) < needed:
            raise ConfigError(
                f"run_dir: {self.path}: {megabytes(free)} are free on its disk, but the run writes at least about "
                f"{megabytes(needed)}: one checkpoint, if it makes any, and its weights; free some, or choose a run_dir on a "
                "larger disk"
            )

    def prepare(self) -> RunDirectory:
        """Create it; move an interrupted run's measurements to `attempt-<n>/`.  Raises ConfigError."""
        self.require_unfinished()
        self.require_no_checkpoints()
        self.require_own()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run_dir: {self.path} cannot be created ({error.strerror}); it must be a directory that this user "
                "may write; choose another run_dir"
            ) from error
        leftovers = [self.path / name for name in PRODUCTS if (self.path / name).exists()] + self.rank_traces()
        if self.metrics in leftovers:
            attempt = next(path for n in count(1) if not (path := self.path / f"attempt-{n}").exists())
            attempt.mkdir()
            for leftover in leftovers:
                leftover.rename(attempt / leftover.name)
        else:
            for leftover in leftovers:
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        return self

    def held(self, wait_s: float = HELD_WAIT_S) -> AbstractContextManager[None]:
        return held(self.path, self.holder, wait_s)

    def reopen(self, step: int, saved_at: float) -> None:
        """Cut off what is newer than the checkpoint after `step` steps, at `saved_at` (epoch seconds).

        A finished run's results move to a new `ended-step-<n>/`, `summary.json` last: a killed move is continued.
        """
        if self.finished:
            products = [product for product in (self.weights, self.best, self.trace, self.summary) if product.exists()]
            steps = self.ended_after
            stem = self.path / ("ended" if steps is None else f"ended-step-{steps:06d}")
            folders = (stem if n == 1 else stem.with_name(f"{stem.name}-{n}") for n in count(1))
            folder = next(path for path in folders if not any((path / product.name).exists() for product in products))
            folder.mkdir(exist_ok=True)
            for product in products:
                product.rename(folder / product.name)
        for weights in (self.weights, self.best):
            if weights.exists():  # the run was ended while it wrote its final weights
                shutil.rmtree(weights)
        for path in (self.metrics, self.rollouts):
            _keep_lines(path, lambda line: line["step"] <= step)
        _keep_lines(self.installs, lambda line: line["version"] <= step)
        for path in self.rank_traces():
            _keep_lines(path, lambda span: span["end"] <= saved_at)

    def first_date(self, now: datetime) -> datetime:
        """Return the first start's time, perhaps `now`."""
        with suppress(OSError):  # it exists, or `prepare` reports the fault
            self.path.mkdir(parents=True, exist_ok=True)
            with self.date.open("x", encoding="utf-8") as file:
                file.write(now.isoformat(timespec="seconds") + "\n")
        for _ in range(20):  # another process has made the file and not yet written the line
            if (kept := self.kept_date) is not None:
                return kept
            time.sleep(0.05)
        return now

    @property
    def kept_date(self) -> datetime | None:
        with suppress(OSError, ValueError):
            return datetime.fromisoformat(self.date.read_text(encoding="utf-8").rstrip("\n"))
        return None

    @property
    def ended_after(self) -> int | None:
        if not self.finished:
            return None
        try:
            steps = read_json(self.summary.read_text(encoding="utf-8"))["steps"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return steps if isinstance(steps, int) else None


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a JSONL file with wanted, whole lines."""
    if not path.exists():
        return
    with atomic_writer(path) as file, path.open("rb") as old:
        for number, line in enumerate(old, start=1):
            if not line.endswith(b"\n"):
                continue
            try:
                if wanted(read_json(line)):
                    file.write(line.decode("utf-8"))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}, line {number}: not a line that a run writes ({type(error).__name__}: {error}); only the last "
                    "one may be cut short; remove or repair it, then continue with --resume"
                ) from error


@contextmanager
def atomic_writer(path: str | os.PathLike[str], mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Write a file whole, or not at all if the block raises."""
    target = Path(path)
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with aside.open(mode, encoding="utf-8" if mode == "w" else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with atomic_writer(path) as file:
        file.write(text)


def write_json(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    write_text(path, encode_json(value, indent=2) + "\n")


def encode_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """Encode as JSON; NaN and infinities become null, with their keys in `non_finite`."""
    non_finite: list[str] = []
    plain = _plain(value, "", non_finite)
    if non_finite:
        plain["non_finite"] = non_finite
    return json.dumps(plain, indent=indent, allow_nan=False, ensure_ascii=False)


def _plain(value: Any, key: str, non_finite: list[str]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        if math.isfinite(value):
            return float(value)
        non_finite.append(key)
        return None
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{key}.{name}" if key else str(name), non_finite) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{key}.{index}", non_finite) for index, item in enumerate(value)]
    raise TypeError(f"{key}: {type(value).__name__} has no JSON form; give a number, text, path, list or mapping")
