"""Spans on a fake clock, and the merged file as a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oppo_megatron.errors import DataError
from oppo_megatron.rundir import trace
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.trace import Span, SpanRecorder, merge_traces, read_trace


class FakeClock:
    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def record(spans: SpanRecorder, clock: FakeClock, name: str, role: str, step: int, seconds: float) -> None:
    with spans.span(name, role=role, step=step):
        clock.now += seconds


def test_totals_add_up_by_name_role_and_step() -> None:
    clock = FakeClock()
    spans = SpanRecorder(0, clock=clock)
    record(spans, clock, "decode", "actor", 1, 2.0)
    record(spans, clock, "decode", "actor", 1, 0.5)
    record(spans, clock, "update", "actor", 1, 3.0)
    record(spans, clock, "update", "critic", 1, 4.0)
    record(spans, clock, "decode", "actor", 2, 8.0)
    assert spans.totals(1) == {"decode": 2.5, "update": 7.0}
    assert spans.totals(1, role="critic") == {"update": 4.0}
    assert spans.totals(2) == {"decode": 8.0}
    assert spans.totals(3) == {}
    with pytest.raises(RuntimeError), spans.span("score", role="reward", step=3):
        clock.now += 1.0
        raise RuntimeError
    assert spans.totals(3) == {"score": 1.0}


def test_writing_waits_for_flush_and_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_BUFFERED_SPANS", 5)
    clock = FakeClock()
    spans = SpanRecorder(2, tmp_path, clock)
    path = RunDirectory(tmp_path).rank_trace(2)
    for _ in range(4):
        record(spans, clock, "decode", "actor", 1, 1.0)
    assert not path.exists()
    record(spans, clock, "decode", "actor", 1, 1.0)
    assert len(path.read_text().splitlines()) == 5
    record(spans, clock, "send", "actor", 1, 0.25)
    spans.flush()
    spans.flush()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 6
    assert lines[-1] == {"rank": 2, "role": "actor", "name": "send", "step": 1, "start": 1005.0, "end": 1005.25}


def test_totals_of_old_steps_are_dropped() -> None:
    clock = FakeClock()
    spans = SpanRecorder(0, clock=clock)
    for step in range(trace.KEPT_STEPS + 3):
        record(spans, clock, "decode", "actor", step, 1.0)
    assert [step for step in range(trace.KEPT_STEPS + 3) if spans.totals(step)] == list(range(3, trace.KEPT_STEPS + 3))


def write_two_ranks(folder: Path) -> None:
    for rank, start, work in (
        (0, 1000.0, [("decode", "actor", 1, 1.0), ("update", "actor", 1, 2.0)]),
        (1, 1000.5, [("score", "reward", 1, 0.25), ("score", "critic", 1, 0.5), ("update", "critic", 2, 1.0)]),
    ):
        clock = FakeClock(start)
        spans = SpanRecorder(rank, folder, clock)
        for item in work:
            record(spans, clock, *item)
        spans.flush()


def test_merged_file_is_a_chrome_trace(tmp_path: Path) -> None:
    write_two_ranks(tmp_path)
    assert merge_traces(tmp_path) == tmp_path / "trace.json"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    assert sorted((pid, role) for (pid, _), role in named.items()) == [(0, "actor"), (1, "critic"), (1, "reward")]
    assert len({tid for _, tid in named}) == 3  # Perfetto takes thread ids as unique over processes

    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == 5
    seen = {(e["pid"], named[e["pid"], e["tid"]], e["name"], e["args"]["step"]): (e["ts"], e["dur"]) for e in complete}
    assert seen[0, "actor", "decode", 1] == (0.0, 1e6)
    assert seen[0, "actor", "update", 1] == (1e6, 2e6)
    assert seen[1, "critic", "score", 1] == (0.75e6, 0.5e6)
    assert seen[1, "critic", "update", 2] == (1.25e6, 1e6)
    spans = read_trace(tmp_path / "trace.json")
    assert (spans[0], spans[-1]) == (Span(0, "actor", "decode", 1, 0.0, 1.0), Span(1, "critic", "update", 2, 1.25, 2.25))


def test_merge_survives_a_rank_that_was_killed_while_writing(tmp_path: Path) -> None:
    write_two_ranks(tmp_path)
    path = RunDirectory(tmp_path).rank_trace(1)
    path.write_bytes(path.read_bytes()[:-20])
    merge_traces(tmp_path)
    assert len(read_trace(tmp_path / "trace.json")) == 4


def test_unreadable_traces_are_data_errors(tmp_path: Path) -> None:
    assert merge_traces(tmp_path) is None and list(tmp_path.iterdir()) == [], "there are no spans"
    for content in (None, "{", "[]", "{}"):
        path = tmp_path / "trace.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(DataError, match=r"trace\.json: not a readable trace"):
            read_trace(path)
