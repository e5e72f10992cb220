"""The input of `oppo watch`: the record of a run that may go on, and the ends of its long files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oppo_megatron.errors import DataError
from oppo_megatron.nesting import read_json
from oppo_megatron.report.downtime import without_downtime
from oppo_megatron.report.run_records import RunRecord, read_run
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import Span, read_trace

END_OF_TRACE = 512 * 1024
END_OF_ROLLOUTS = 2 * 1024 * 1024


@dataclass(frozen=True)
class Glance:
    """A run at one moment: `record` with the spans of its last steps, its newest response, seconds since its last line.

    `stamp` changes when a file does.
    """

    record: RunRecord
    newest: Mapping[str, Any] | None
    quiet_s: float | None
    stamp: tuple[tuple[str, int, int], ...]

    @property
    def finished(self) -> bool:
        return self.record.summary is not None


def glance(path: str | os.PathLike[str], now: float | None = None, before: Glance | None = None) -> Glance:
    """Read a run directory, to which another process may be writing; what did not change since `before` is not read again.

    `now` in seconds since the epoch.  Raises DataError.
    """
    run = RunDirectory(path)
    stamp, quiet_s = _stamp(run), _quiet_s(run, time.time() if now is None else now)
    if before is not None and stamp == before.stamp:
        return replace(before, quiet_s=quiet_s)
    record = read_run(path, spans=False)
    spans, no_spans = _last_spans(run)
    record = replace(record, spans=without_downtime(spans, record.lines), no_spans=no_spans)
    trained = (row for row in reversed(last_objects(run.rollouts, END_OF_ROLLOUTS)) if not row.get("greedy"))
    newest = next(trained, None)
    return Glance(record, newest, quiet_s, stamp)


def _stamp(run: RunDirectory) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of each file that a glance reads; one that vanishes meanwhile is left out."""
    found = []
    for path in (run.config, run.metrics, run.rollouts, run.summary, run.trace, *run.rank_traces()):
        with suppress(OSError):
            stat = path.stat()
            found.append((path.name, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _quiet_s(run: RunDirectory, now: float) -> float | None:
    return max(0.0, now - run.metrics.stat().st_mtime) if run.metrics.exists() else None


def last_objects(path: Path, num_bytes: int) -> list[dict[str, Any]]:
    """The objects of the last lines of a JSONL file that lie whole within its last bytes; none where it is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines[size > num_bytes : -1]:  # the last one is empty, or half written
        try:
            value = read_json(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _last_spans(run: RunDirectory) -> tuple[list[Span], str]:
    """The spans of the last steps that every rank's file reaches back to."""
    try:
        ranks = [[Span(**line) for line in last_objects(path, END_OF_TRACE)] for path in run.rank_traces()]
    except TypeError as error:
        return [], f"its trace.rank*.jsonl hold other fields than spans ({error})"
    if not any(ranks):
        return _finished_spans(run)
    first = max((min(span.step for span in spans) for spans in ranks if spans), default=0)
    return [span for spans in ranks for span in spans if span.step >= first], ""


def _finished_spans(run: RunDirectory) -> tuple[list[Span], str]:
    if not run.trace.exists():
        return [], "no trace was recorded (run with logging.trace=true)"
    try:
        return read_trace(run.trace), ""
    except DataError as error:
        return [], str(error)
