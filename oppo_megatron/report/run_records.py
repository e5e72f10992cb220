"""A finished or running run, as read from its run directory."""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from oppo_megatron.errors import DataError
from oppo_megatron.nesting import read_json
from oppo_megatron.report.charts import COLOURS
from oppo_megatron.rundir.directory import RUN_FORMAT, RunDirectory
from oppo_megatron.rundir.metrics_log import iter_json_lines, read_metrics
from oppo_megatron.rundir.trace import Span, read_spans

MetricsLine = Mapping[str, Any]
SHORTEST_PAUSE_S = 1.0
STEP_OF_LINE = re.compile(rb'\{"step": (\d+),')
# field -> label, colour
STEP_PARTS = {
    "decode_s": ("decode", COLOURS["decode"]),
    "score_exposed_s": ("exposed scoring", COLOURS["score"]),
    "train_s": ("training: actor", COLOURS["update"]),
    "critic_exposed_s": ("training: critic, exposed", COLOURS["critic"]),
}
IDLE = "idle_s"
ALL_PARTS = {**STEP_PARTS, IDLE: ("idle and other", COLOURS["idle"])}


@dataclass(frozen=True)
class RunRecord:
    """A run, `lines` in step order.  `summary`: None until it has ended.  `spans`: in seconds; `no_spans`: reason for none."""

    name: str
    run: RunDirectory
    lines: Sequence[MetricsLine]
    summary: Mapping[str, Any] | None
    config: Mapping[str, Any]
    spans: Sequence[Span] = field(repr=False, default=())
    no_spans: str = ""

    @property
    def kind(self) -> str:
        """`train` or `supervised`."""
        supervised = any("loss" in line for line in self.lines[:1]) if self.lines else "rollout" not in self.config
        return "supervised" if supervised else "train"

    def known(self, key: str, x_key: str = "step") -> tuple[list[Any], list[float]]:
        """Numbers of a field and their steps (or `x_key`)."""
        found = [(line["step"] if x_key == "step" else number(line, x_key), number(line, key)) for line in self.lines]
        points = [(x, y) for x, y in found if x is not None and y is not None]
        return [x for x, _ in points], [y for _, y in points]

    def has(self, key: str) -> bool:
        return any(number(line, key) is not None for line in self.lines)


def number(line: Mapping[Any, Any], key: str) -> float | None:
    """Finite number in a field (`field.key`: of a mapping), or None."""
    value: Any = line
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def split_step(line: MetricsLine) -> dict[str, float]:
    """Split `line["step_s"]` into `ALL_PARTS`; decoding is without scoring."""
    parts = {key: number(line, key) or 0.0 for key in STEP_PARTS}
    step_s = number(line, "step_s") or 0.0
    parts["decode_s"] = max(0.0, parts["decode_s"] - max(0.0, sum(parts.values()) - step_s))
    parts["decode_s"] *= 1.0 - (number(line, "bubble_share") or 0.0)
    return {**parts, IDLE: max(0.0, step_s - sum(parts.values()))}


def deferred_counts(lines: Sequence[MetricsLine]) -> Counter[int]:
    """Trained responses by the steps they were carried over."""
    total: Counter[int] = Counter()
    for line in lines:
        deferred = line.get("deferred")
        for times in deferred if isinstance(deferred, Mapping) else {}:
            count = number(line, f"deferred.{times}")
            if times.isdecimal() and count is not None and count > 0:
                total[int(times)] += int(count)
    return total


def memory_peaks(line: MetricsLine) -> list[float | None]:
    """Peak MiB by rank, None if unknown; or empty."""
    value = line.get("memory_peak_mb")
    peaks = [number({"peak": peak}, "peak") for peak in value] if isinstance(value, list) else []
    return peaks if any(peak is not None for peak in peaks) else []


def read_runs(paths: Sequence[str | os.PathLike[str]], progress: Callable[[str], None] = lambda line: None) -> list[RunRecord]:
    """Read run directories, named by the shortest distinct path ends.  Raises DataError."""
    resolved = [Path(path).resolve() for path in paths]
    for place, path in enumerate(resolved):
        if path in resolved[:place]:
            raise DataError(f"{paths[place]}: given twice; name each run directory once")
    records = []
    for given, name in zip(paths, distinct_names(resolved), strict=True):
        progress(f"reading {name}")
        records.append(read_run(given, name))
    return records


def read_run(path: str | os.PathLike[str], name: str | None = None, *, spans: bool = True) -> RunRecord:
    """Read a run, possibly unfinished.  Raises DataError, or ConfigError for a pipe, socket or device."""
    run = RunDirectory(path)
    if not run.path.is_dir():
        what = "a file" if run.path.exists() else "no such directory"
        raise DataError(f"{run.path}: {what}; give the run_dir of a run, the folder that holds its metrics.jsonl")
    if not run.metrics.exists() and not run.config.exists():
        inside = sorted(entry.parent.name for entry in run.path.glob("*/metrics.jsonl"))
        remedy = f"it holds the runs {', '.join(inside)}: name those" if inside else "give the run_dir of a run"
        raise DataError(f"{run.path}: not a run directory: it has neither metrics.jsonl nor config.yaml; {remedy}")
    run.require_regular()
    written = _read_object(run.hosts).get("format", RUN_FORMAT)
    if not isinstance(written, int) or written > RUN_FORMAT:
        raise DataError(
            f"{run.path}: its files have format {written!r} (hosts.json), and this version of oppo_megatron reads "
            f"formats up to {RUN_FORMAT}; use the version that made the run, or a later one"
        )
    lines = read_metrics(run.metrics) if run.metrics.exists() else []
    for place, line in enumerate(lines, start=1):
        if not isinstance(line.get("step"), int):
            raise DataError(
                f"{run.metrics}, line {place}: `step` is {line.get('step')!r}; each line needs the number of its step; "
                "repair or remove the line"
            )
    found: list[Span] = []
    no_spans = "no trace was recorded (run with logging.trace=true)"
    if spans:
        try:
            found = without_downtime(read_spans(run), lines)
            no_spans = "" if found else no_spans
        except DataError as error:
            no_spans = str(error)
    summary = _read_object(run.summary) if run.finished else None
    return RunRecord(name or run.path.resolve().name, run, lines, summary, run.settings(), found, no_spans)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Shortest distinct ends of the paths, with as many folders."""
    for depth in range(1, 1 + max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("resolved paths differ")


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if missing or unreadable."""
    try:
        value = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def without_downtime(spans: Sequence[Span], lines: Sequence[MetricsLine]) -> list[Span]:
    """Remove pauses between attempts (without spans, longer than the steps around them); return spans by start."""
    took_s = {line["step"]: (number(line, "step_s") or 0.0) + (number(line, "checkpoint_s") or 0.0) for line in lines}
    order = sorted(spans, key=lambda span: span.start)
    ends, gaps = [], []  # end and seconds of each pause
    reached = order[0] if order else None
    for span in order:
        assert reached is not None
        gap = span.start - reached.end
        if gap > max(SHORTEST_PAUSE_S, *(took_s.get(step, math.inf) for step in (reached.step, span.step))):
            ends.append(span.start)
            gaps.append(gap)
        if span.end >= reached.end:
            reached = span
    shifts = [0.0, *accumulate(gaps)]
    moved = []
    for span in order:
        shift = shifts[bisect_right(ends, span.start)]
        moved.append(replace(span, start=span.start - shift, end=span.end - shift) if shift else span)
    return moved


def sample_responses(record: RunRecord) -> tuple[list[Mapping[str, Any]], str]:
    """Trained responses of three steps: lowest, middle, highest reward, and the longest; or the reason for none."""
    if not record.run.rollouts.exists():
        return [], "run with logging.rollouts=true"
    steps = [line["step"] for line in record.lines if not line.get("skipped")]
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    if steps:
        by_step = {step: [] for step in (steps[0], steps[len(steps) // 2], steps[-1])}

    def is_wanted(line: bytes) -> bool:  # the journal writes the step first: other lines of a large file stay unparsed
        match = STEP_OF_LINE.match(line)
        return match is None or int(match[1]) in by_step

    try:
        for row in iter_json_lines(record.run.rollouts, is_wanted):
            if row.get("step") in by_step and number(row, "reward") is not None and not row.get("greedy"):
                by_step[row["step"]].append(row)
    except DataError as error:
        return [], str(error)
    chosen: list[Mapping[str, Any]] = []
    for rows in filter(None, by_step.values()):
        by_reward = sorted(rows, key=lambda row: row["reward"])
        longest = max(rows, key=lambda row: len(row["tokens"]) if isinstance(row.get("tokens"), list) else 0)
        few = [by_reward[0], by_reward[len(rows) // 2], by_reward[-1], longest]
        chosen += {id(row): row for row in few}.values()
    return chosen, "" if chosen else "rollouts.jsonl has none of the steps in metrics.jsonl"
