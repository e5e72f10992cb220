"""`metrics.jsonl`, an object per step, and the figures of a run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, final

from oppo_megatron.errors import DataError
from oppo_megatron.nesting import read_json
from oppo_megatron.rundir.directory import encode_json

MAX_PENDING = 8
MEAN_FIELDS = ("step_s", "decode_s", "train_s", "score_exposed_s", "critic_update_s", "critic_exposed_s")


@final
class MetricsLog:
    """Appends lines in order; a critic's update may complete a line after the next begins."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._file = self.path.open("a", encoding="utf-8")
        self._lines: dict[int, dict[str, Any]] = {}  # by step, in step order
        self._ready: set[int] = set()
        self._last_step: int | None = None

    def stage(self, step: int, fields: Mapping[str, Any]) -> None:
        assert self._last_step is None or step > self._last_step, f"line {step} begun after line {self._last_step}"
        assert len(self._lines) < MAX_PENDING, f"lines {list(self._lines)} wait to be completed"
        self._last_step = step
        self._lines[step] = {"step": step, **fields}

    def extend(self, step: int, fields: Mapping[str, Any]) -> None:
        self._lines[step].update(fields)

    def complete(self, step: int, more_fields: Mapping[str, Any] | None = None) -> None:
        assert step in self._lines and step not in self._ready, f"line {step} is not pending"
        self._lines[step].update(more_fields or {})
        self._ready.add(step)
        while self._lines and (first := next(iter(self._lines))) in self._ready:
            self._ready.remove(first)
            self._write(self._lines.pop(first))

    def write(self, step: int, fields: Mapping[str, Any]) -> None:
        self.stage(step, fields)
        self.complete(step)

    def close(self) -> None:
        """Write pending lines and close; may be called again."""
        for step, line in self._lines.items():
            self._write(line if step in self._ready else {**line, "incomplete": True})
        self._lines.clear()
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(encode_json(line) + "\n")
        self._file.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_installs(path: str | os.PathLike[str]) -> dict[int, int]:
    """Decode clock of each version's installation, from `installs.jsonl`.  Raises DataError."""
    try:
        lines = [(line["version"], line["clock"]) for line in iter_json_lines(path)]
    except KeyError as error:
        raise DataError(f"{path}: a line lacks {error}; give the installs.jsonl of a run with overlap.continuous") from error
    whole = bool(lines) and all(type(number) is int for line in lines for number in line)
    if not whole or [v for v, _ in lines] != [*range(1, len(lines) + 1)] or [c for _, c in lines] != sorted(c for _, c in lines):
        raise DataError(f"{path}: versions follow each other from 1 on, and clocks do not fall; give the file as a run wrote it")
    return dict(lines)


def iter_json_lines(path: str | os.PathLike[str], wanted: Callable[[bytes], bool] | None = None) -> Iterator[dict[str, Any]]:
    """Yield objects of `wanted` lines, except a cut last one.  Raises DataError."""
    if not Path(path).is_file():
        raise DataError(f"{os.fspath(path)}: no such file; expected the lines that a run writes; check the run directory")
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip() or (wanted is not None and not wanted(line)):
                continue
            try:
                value = read_json(line)
            except ValueError as error:
                if not file.read(1):
                    return
                raise DataError(
                    f"{os.fspath(path)}, line {number}: not JSON ({error}); only the last line of a run may be cut "
                    "short; remove or repair the line"
                ) from error
            if not isinstance(value, dict):
                raise DataError(
                    f"{os.fspath(path)}, line {number}: of type {type(value).__name__}, but must be a JSON object; repair it"
                )
            yield value


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    return list(iter_json_lines(path))


def summarise(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute a run's figures; None if fields are missing.

    Times, `tokens_per_s` and `scoring_hidden` (1 - exposed / busy scorer seconds) omit the first of more than three steps.
    `reward_first`, `reward_last`: means of a tenth of the steps, at least 3.  `deferred`: sequences by steps carried over.
    """
    steady = lines[1:] if len(lines) > 3 else lines
    rewards = _values(lines, "reward_mean")
    tail = max(3, len(rewards) // 10)
    exposed_share = _ratio(steady, "score_exposed_s", "score_busy_s")
    deferred: Counter[str] = Counter()
    for line in lines:
        deferred.update(line.get("deferred") or {})
    return {
        "steps": len(lines),
        **{name: _mean(_values(steady, name)) for name in MEAN_FIELDS},
        "scoring_hidden": None if exposed_share is None else max(0.0, 1.0 - exposed_share),
        "tokens_per_s": _ratio(steady, "tokens", "step_s"),
        "reward_first": _mean(rewards[:tail]),
        "reward_last": _mean(rewards[-tail:]),
        "skipped_steps": sum(line.get("skipped") is not None for line in lines),
        "deferred": {times: deferred[times] for times in sorted(deferred, key=int)},
    }


def _values(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _ratio(lines: Sequence[Mapping[str, Any]], above: str, below: str) -> float | None:
    both = [line for line in lines if line.get(above) is not None and line.get(below) is not None]
    total = sum(line[below] for line in both)
    return sum(line[above] for line in both) / total if total else None
