"""metrics.jsonl: order of lines that are completed late, reading after a crash, and the figures of a run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oppo_megatron.errors import DataError
from oppo_megatron.rundir.metrics_log import MAX_PENDING, MetricsLog, read_metrics, summarise


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
            in_order = next((step for step in range(MAX_PENDING) if step not in completed), MAX_PENDING)
            assert written == list(range(in_order))
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


def test_every_truncation_of_the_last_line_is_read(tmp_path: Path) -> None:
    whole = b'{"step": 1, "name": "\xce\xb4"}\n'
    last = b'{"step": 2, "name": "\xce\xb4"}\n'
    path = tmp_path / "metrics.jsonl"
    for length in range(len(last)):
        path.write_bytes(whole + last[:length])
        steps = [line["step"] for line in read_metrics(path)]
        assert steps == ([1, 2] if length == len(last) - 1 else [1])


def test_bad_lines_elsewhere_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: not JSON"):
        read_metrics(path)
    path.write_text('{"step": 1}\n[2]\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"line 2: a list"):
        read_metrics(path)
    with pytest.raises(DataError, match="no such file"):
        read_metrics(tmp_path / "absent.jsonl")


def line(step: int, **fields: Any) -> dict[str, Any]:
    return {"step": step, **fields}


def test_summary_leaves_out_the_warm_up_step() -> None:
    lines = [
        line(1, step_s=100.0, decode_s=90.0, train_s=9.0, score_exposed_s=50.0, score_busy_s=50.0, tokens=1, reward_mean=0.0),
        line(2, step_s=2.0, decode_s=1.0, train_s=0.5, score_exposed_s=0.2, score_busy_s=1.0, tokens=10, reward_mean=1.0),
        line(3, step_s=4.0, decode_s=2.0, train_s=1.0, score_exposed_s=0.1, score_busy_s=3.0, tokens=20, reward_mean=2.0),
        line(4, step_s=6.0, decode_s=3.0, train_s=1.5, score_exposed_s=0.1, score_busy_s=4.0, tokens=30, reward_mean=6.0),
    ]
    lines[1]["deferred"] = {"0": 7, "1": 1}
    lines[0]["deferred"] = {"0": 8}
    lines[3]["deferred"] = {"10": 1, "2": 3, "0": 4}
    summary = summarise(lines)
    expected = {
        "step_s": 4.0, "decode_s": 2.0, "train_s": 1.0, "score_exposed_s": 0.4 / 3, "scoring_hidden": 1 - 0.4 / 8,
        "tokens_per_s": 60 / 12, "reward_first": 1.0, "reward_last": 3.0,  # rewards count from the first step: 0, 1, 2
    }  # fmt: skip
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert list(summary["deferred"].items()) == [("0", 19), ("1", 1), ("2", 3), ("10", 1)]
    assert summarise(lines[:3])["step_s"] == pytest.approx(106 / 3)


def test_summaries_of_long_and_of_empty_runs() -> None:
    summary = summarise([line(step, reward_mean=float(step)) for step in range(100)])
    assert (summary["reward_first"], summary["reward_last"]) == (4.5, 94.5), "means of a tenth"
    assert summarise([line(1, score_exposed_s=2.0, score_busy_s=1.0)])["scoring_hidden"] == 0.0
    for lines in ([], [line(1, reward_mean=None, score_exposed_s=0.0, score_busy_s=0.0)]):
        summary = summarise(lines)
        assert summary["steps"] == len(lines)
        assert summary["reward_first"] is summary["scoring_hidden"] is summary["step_s"] is summary["tokens_per_s"] is None
        assert summary["deferred"] == {}
