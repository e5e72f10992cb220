"""Spans recorded on each rank, merged into one file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from oppo_megatron.clock import SteadyClock
from oppo_megatron.errors import DataError
from oppo_megatron.nesting import read_json
from oppo_megatron.rundir.directory import RunDirectory, atomic_writer
from oppo_megatron.rundir.metrics_log import iter_json_lines

MAX_BUFFERED_SPANS = 4096
KEPT_STEPS = 16


@dataclass(frozen=True, slots=True)
class Span:
    """Work of one rank for one role, in seconds of the common clock."""

    rank: int
    role: str
    name: str
    step: int
    start: float
    end: float


class SpanRecorder:
    """Records from one thread; spans of a role may nest but not cross.

    Keeps totals of `KEPT_STEPS` steps, and spans with a `run_dir`.  `clock`: common epoch seconds.
    """

    def __init__(
        self, rank: int, run_dir: str | os.PathLike[str] | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self.rank, self.clock = rank, clock or SteadyClock()
        self._path = None if run_dir is None else RunDirectory(run_dir).rank_trace(rank)
        self._buffer: list[Span] = []
        self._totals: dict[int, defaultdict[tuple[str, str], float]] = {}  # step -> (role, name) -> seconds

    @contextmanager
    def span(self, name: str, *, role: str, step: int) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            span = Span(self.rank, role, name, step, start, self.clock())
            self.count(span)
            self.write(span)

    def totals(self, step: int, role: str | None = None) -> dict[str, float]:
        """Seconds by span name in a recent step; nested spans each count."""
        seconds: dict[str, float] = defaultdict(float)
        for (span_role, name), value in self._totals.get(step, {}).items():
            if role is None or span_role == role:
                seconds[name] += value
        return dict(seconds)

    def flush(self) -> None:
        if self._path is not None and self._buffer:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(span)) + "\n" for span in self._buffer)
            self._buffer.clear()

    def count(self, span: Span) -> None:
        totals = self._totals.setdefault(span.step, defaultdict(float))
        totals[span.role, span.name] += span.end - span.start
        if len(self._totals) > KEPT_STEPS:
            del self._totals[min(self._totals)]

    def write(self, span: Span) -> None:
        if self._path is not None:
            self._buffer.append(span)
            if len(self._buffer) >= MAX_BUFFERED_SPANS:
                self.flush()


def merge_traces(run_dir: str | os.PathLike[str]) -> Path | None:
    """Merge flushed files into `trace.json` (Trace Event Format); None without spans."""
    run = RunDirectory(run_dir)
    files = run.rank_traces()
    origin, lanes = float("inf"), set()
    for span in _read_spans(files):
        origin = min(origin, span.start)
        lanes.add((span.rank, span.role))
    if not lanes:
        return None
    thread_of = {lane: number for number, lane in enumerate(sorted(lanes), start=1)}
    names = {(rank, 0): ("process_name", f"rank {rank}") for rank, _ in thread_of}
    names |= {(rank, thread): ("thread_name", role) for (rank, role), thread in thread_of.items()}
    heads = [{"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": {"name": x}} for (rank, tid), (kind, x) in names.items()]
    with atomic_writer(run.trace) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(map(json.dumps, heads)))
        for span in _read_spans(files):
            event = {
                "ph": "X", "name": span.name, "cat": span.role, "pid": span.rank, "tid": thread_of[span.rank, span.role],
                "args": {"step": span.step}, "ts": round((span.start - origin) * 1e6, 3),
                "dur": round((span.end - span.start) * 1e6, 3),
            }  # fmt: skip
            file.write(",\n" + json.dumps(event))
        file.write("\n]}\n")
    for path in files:
        path.unlink()
    return run.trace


def read_trace(path: str | os.PathLike[str]) -> list[Span]:
    """Read `trace.json`, in seconds from the start.  Raises DataError."""
    try:
        events = read_json(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        return [
            Span(e["pid"], e["cat"], e["name"], e["args"]["step"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
            for e in events
            if e["ph"] == "X"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{os.fspath(path)}: not a readable trace ({type(error).__name__}: {error}); expected the trace.json of a run "
            "with logging.trace on; check the path, or run again with it on"
        ) from error


def read_spans(run_dir: str | os.PathLike[str]) -> list[Span]:
    """Read spans, in seconds from the first.  Raises DataError."""
    run = RunDirectory(run_dir)
    if run.trace.exists():
        return read_trace(run.trace)
    try:
        spans = list(_read_spans(run.rank_traces()))
    except (DataError, TypeError) as error:
        if run.trace.exists():  # merged meanwhile
            return read_trace(run.trace)
        raise DataError(f"{run.path}: unreadable spans ({error}); remove or repair its trace.rank*.jsonl") from error
    origin = min((span.start for span in spans), default=0.0)
    return [replace(span, start=span.start - origin, end=span.end - origin) for span in spans]


def _read_spans(files: Iterable[Path]) -> Iterator[Span]:
    for path in files:
        for line in iter_json_lines(path):
            yield Span(**line)
