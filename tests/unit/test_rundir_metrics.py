"""The metrics log and its summary; spans, their totals and the merged trace."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.errors import DataError
from oppo_megatron.rundir import trace
from oppo_megatron.rundir.directory import RunDirectory
from oppo_megatron.rundir.metrics_log import MAX_PENDING, MetricsLog, read_installs, read_metrics, summarise
from oppo_megatron.rundir.trace import Span, SpanRecorder, merge_traces, read_trace


@given(st.permutations(range(MAX_PENDING)), st.integers(0, MAX_PENDING))
def test_any_order_of_completion_writes_all_in_order(order: list[int], num_completed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        with MetricsLog(path) as log:
            for step in range(MAX_PENDING):
                log.stage(step, {"replaced": "old"})
            completed = order[:num_completed]
            for step in completed:
                log.complete(step, {"done": True, "replaced": "new"})
            written = [line["step"] for line in read_metrics(path)]
            assert written == list(range(next((step for step in range(MAX_PENDING) if step not in completed), MAX_PENDING)))
        lines = read_metrics(path)
        assert [line["step"] for line in lines] == list(range(MAX_PENDING))
        assert {line["step"] for line in lines if line.get("incomplete")} == set(range(MAX_PENDING)) - set(completed)
        assert all(line.get("done", False) != line.get("incomplete", False) for line in lines)
        assert all((line["replaced"] == "new") == line.get("done", False) for line in lines)


def test_pending_lines_survive_a_failing_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(RuntimeError), MetricsLog(path) as log:
        log.stage(5, {"reward_mean": 0.5})
        raise RuntimeError
    assert read_metrics(path) == [{"step": 5, "reward_mean": 0.5, "incomplete": True}]


def test_misuse_is_caught(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.stage(3, {})
        for wrong in (lambda: log.stage(3, {}), lambda: log.stage(2, {}), lambda: log.complete(4)):
            with pytest.raises(AssertionError):
                wrong()
        for step in range(4, 3 + MAX_PENDING):
            log.stage(step, {})
        with pytest.raises(AssertionError, match="wait"):
            log.stage(100, {})


def test_a_line_is_on_disk_at_once_with_non_finite_values_as_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(1, {"grad_norm": float("inf"), "loss": float("nan"), "ok": 1.0})
        written = read_metrics(path)  # at once
    assert written == [{"step": 1, "grad_norm": None, "loss": None, "ok": 1.0, "non_finite": ["grad_norm", "loss"]}]


def test_every_truncation_of_the_last_line_is_read_and_bad_lines_elsewhere_are_named(tmp_path: Path) -> None:
    whole = b'{"step": 1, "name": "\xce\xb4"}\n'
    last = b'{"step": 2, "name": "\xce\xb4"}\n'
    path = tmp_path / "metrics.jsonl"
    for length in range(len(last)):
        path.write_bytes(whole + last[:length])
        assert [line["step"] for line in read_metrics(path)] == ([1, 2] if length == len(last) - 1 else [1])
    path = tmp_path / "metrics.jsonl"
    for second, said in (('{"step": ', "not JSON"), ("[2]", "of type list")):
        path.write_text(f'{{"step": 1}}\n{second}\n{{"step": 3}}\n')
        with pytest.raises(DataError, match=rf"metrics\.jsonl, line 2: {said}"):
            read_metrics(path)
    with pytest.raises(DataError, match="no such file"):
        read_metrics(tmp_path / "absent.jsonl")


def test_summary_leaves_out_the_warm_up_step() -> None:
    names = ("step", "step_s", "decode_s", "train_s", "score_exposed_s", "score_busy_s", "tokens", "reward_mean", "deferred")
    rows = [
        (1, 100.0, 90.0, 9.0, 50.0, 50.0, 1, 0.0, {"0": 8}), (2, 2.0, 1.0, 0.5, 0.2, 1.0, 10, 1.0, {"0": 7, "1": 1}),
        (3, 4.0, 2.0, 1.0, 0.1, 3.0, 20, 2.0, {}), (4, 6.0, 3.0, 1.5, 0.1, 4.0, 30, 6.0, {"10": 1, "2": 3, "0": 4}),
    ]  # fmt: skip
    lines = [dict(zip(names, row, strict=True)) for row in rows]
    summary = summarise(lines)
    expected = {
        "step_s": 4.0, "decode_s": 2.0, "train_s": 1.0, "score_exposed_s": 0.4 / 3, "scoring_hidden": 1 - 0.4 / 8,
        "tokens_per_s": 60 / 12, "reward_first": 1.0, "reward_last": 3.0,  # rewards count from the first step: 0, 1, 2
    }  # fmt: skip
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert list(summary["deferred"].items()) == [("0", 19), ("1", 1), ("2", 3), ("10", 1)]
    assert summarise(lines[:3])["step_s"] == pytest.approx(106 / 3)


def test_summaries_of_long_and_of_empty_runs() -> None:
    summary = summarise([{"step": step, "reward_mean": float(step)} for step in range(100)])
    assert (summary["reward_first"], summary["reward_last"]) == (4.5, 94.5), "means of a tenth"
    assert summarise([{"step": 1, "score_exposed_s": 2.0, "score_busy_s": 1.0}])["scoring_hidden"] == 0.0
    for lines in ([], [{"step": 1, "reward_mean": None, "score_exposed_s": 0.0, "score_busy_s": 0.0}]):
        summary = summarise(lines)
        assert summary["steps"] == len(lines)
        assert summary["reward_first"] is summary["scoring_hidden"] is summary["step_s"] is summary["tokens_per_s"] is None
        assert summary["deferred"] == {}


class Recorder(SpanRecorder):
    """A recorder on a clock that its spans move."""

    def __init__(self, rank: int, run: Any = None, now: float = 1000.0):
        self.now = now
        super().__init__(rank, run, lambda: self.now)

    def record(self, name: str, role: str, step: int, seconds: float) -> None:
        with self.span(name, role=role, step=step):
            self.now += seconds


def test_totals_add_up_by_name_role_and_step() -> None:
    spans = Recorder(0)
    for name, role, step, seconds in (
        ("decode", "actor", 1, 2.0), ("decode", "actor", 1, 0.5), ("update", "actor", 1, 3.0), ("update", "critic", 1, 4.0),
        ("decode", "actor", 2, 8.0),
    ):  # fmt: skip
        spans.record(name, role, step, seconds)
    assert spans.totals(1) == {"decode": 2.5, "update": 7.0} and spans.totals(1, role="critic") == {"update": 4.0}
    assert spans.totals(2) == {"decode": 8.0} and spans.totals(3) == {}
    with pytest.raises(RuntimeError), spans.span("score", role="reward", step=3):
        spans.now += 1.0
        raise RuntimeError
    assert spans.totals(3) == {"score": 1.0}


def test_writing_waits_for_flush_and_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_BUFFERED_SPANS", 5)
    spans, path = Recorder(2, tmp_path), RunDirectory(tmp_path).rank_trace(2)
    for _ in range(5):
        assert not path.exists()
        spans.record("decode", "actor", 1, 1.0)
    assert len(path.read_text().splitlines()) == 5
    spans.record("send", "actor", 1, 0.25)
    spans.flush()
    spans.flush()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 6
    assert lines[-1] == {"rank": 2, "role": "actor", "name": "send", "step": 1, "start": 1005.0, "end": 1005.25}


def test_totals_of_old_steps_are_dropped() -> None:
    spans = Recorder(0)
    for step in range(trace.KEPT_STEPS + 3):
        spans.record("decode", "actor", step, 1.0)
    assert [step for step in range(trace.KEPT_STEPS + 3) if spans.totals(step)] == list(range(3, trace.KEPT_STEPS + 3))


def write_two_ranks(folder: Path) -> None:
    for rank, start, work in (
        (0, 1000.0, [("decode", "actor", 1, 1.0), ("update", "actor", 1, 2.0)]),
        (1, 1000.5, [("score", "reward", 1, 0.25), ("score", "critic", 1, 0.5), ("update", "critic", 2, 1.0)]),
    ):
        spans = Recorder(rank, folder, start)
        for item in work:
            spans.record(*item)
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
    assert seen[0, "actor", "decode", 1] == (0.0, 1e6) and seen[0, "actor", "update", 1] == (1e6, 2e6)
    assert seen[1, "critic", "score", 1] == (0.75e6, 0.5e6) and seen[1, "critic", "update", 2] == (1.25e6, 1e6)
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


@pytest.mark.parametrize(("text", "told"), [
    ("", "versions follow each other"), ("hello\n", "versions follow each other"), ('{"version": 2, "clock": 5}\n', "from 1 on"),
    ('{"version": 1, "clock": 5}\n{"version": 2, "clock": 4}\n', "do not fall"), ('{"version": 1}\n', "lacks 'clock'"),
    ('{"version": 1, "clock": 2.5}\n', "versions follow each other"), ("[1]\nx\n", "installs.jsonl"),
])  # fmt: skip
def test_a_log_of_installations_is_whole(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "installs.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=told):
        read_installs(path)
    path.write_text('{"version": 1, "clock": 5, "weights": "00ff"}\n{"version": 2, "clock": 5}\n')
    assert read_installs(path) == {1: 5, 2: 5}
