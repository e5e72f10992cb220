"""The run directory: what it refuses, what it keeps, and that files appear whole or not at all."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.rundir import disk
from oppo_megatron.rundir.directory import RunDirectory, atomic_writer, encode_json, write_json, write_text


def test_naming_a_run_touches_no_disk_and_preparing_makes_parents(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    assert run.prepare() is run and run.path.is_dir()


def test_a_finished_run_is_refused_and_untouched(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).prepare()
    run.metrics.write_text("{}\n")
    write_json(run.summary, {"steps": 1})
    with pytest.raises(ConfigError, match=r"(?s)run_dir.*finished run.*choose another") as error:
        RunDirectory(tmp_path).prepare()
    assert str(tmp_path) in str(error.value)
    assert run.metrics.exists() and run.finished


def test_what_an_interrupted_run_measured_is_kept_aside(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for attempt in (1, 2):
        run.prepare()
        assert not run.metrics.exists()
        run.metrics.write_text(f"attempt {attempt}")
        run.rank_trace(0).write_text("")
    run.prepare()
    assert (tmp_path / "attempt-1" / "metrics.jsonl").read_text() == "attempt 1"
    assert (tmp_path / "attempt-2" / "metrics.jsonl").read_text() == "attempt 2"
    assert run.rank_traces() == []


def test_a_file_in_the_way_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be created"):
            RunDirectory(path).prepare()


def test_rank_traces_are_in_numeric_order(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for rank in (10, 2, 0):
        run.rank_trace(rank).write_text("")
    assert run.rank_traces() == [run.rank_trace(0), run.rank_trace(2), run.rank_trace(10)]


def test_one_process_at_a_time_is_at_work_in_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.held():
        told = f"another run uses {run.path} .process {os.getpid()} on {socket.gethostname()}., and has been for 0 s"
        with pytest.raises(ConfigError, match=told), RunDirectory(run.path).held(wait_s=0.0):
            pytest.fail("both have it")
        assert run.holder.exists()
    assert list(run.path.iterdir()) == []
    run.holder.write_text('{"pid": 1, "host": "of a run that was killed"}')
    with run.held(wait_s=0.0):
        assert json.loads(run.holder.read_text())["pid"] == os.getpid()
    (tmp_path / "file").touch()
    with RunDirectory(tmp_path / "file" / "run").held():  # which `prepare` refuses
        pass


class Clock:
    """Time passes while somebody sleeps; `due` happens `after_s`."""

    def __init__(self, after_s: float, due: Callable[[], None]):
        self.now, self.after_s, self.due = 0.0, after_s, due

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.after_s:
            self.due()


@pytest.mark.parametrize(("ends_s", "begins"), [(19.0, True), (21.0, False)])
def test_a_second_start_waits_for_the_first_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_s: float, begins: bool
) -> None:
    with ExitStack() as first:
        first.enter_context(RunDirectory(tmp_path).held())
        clock = Clock(ends_s, first.close)
        monkeypatch.setattr(disk, "time", clock)
        refused = nullcontext() if begins else pytest.raises(ConfigError, match="has been for 20 s; wait for its end")
        with refused, RunDirectory(tmp_path).held():
            assert begins
    assert clock.now == pytest.approx(min(ends_s, 20.0), abs=0.2)


def test_only_the_last_line_of_a_run_may_be_cut_short(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    run.reopen(2, 0.0)
    assert run.metrics.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    for damaged in (b"\0" * 40, b"[1]", b"{}", b"\xff", b'{"step": "x"}', b"[" * 100_000):
        run.metrics.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
        with pytest.raises(DataError, match="metrics.jsonl, line 2: not a line that a run writes.*--resume"):
            run.reopen(3, 0.0)
        assert damaged in run.metrics.read_bytes()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "config.yaml"
    write_text(target, "old")
    with pytest.raises(RuntimeError), atomic_writer(target) as file:
        file.write("half")
        file.flush()
        assert target.read_text() == "old"
        raise RuntimeError
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
    with target.open() as reader:
        write_text(target, "new and longer \N{GREEK SMALL LETTER DELTA}")
        assert reader.read() == "old"
    assert target.read_text(encoding="utf-8") == "new and longer \N{GREEK SMALL LETTER DELTA}"


def test_json_of_numbers_that_are_not_finite() -> None:
    line = json.loads(encode_json({"a": float("nan"), "b": {"c": float("-inf"), "d": 1.5}, "e": [1, float("inf")], "f": True}))
    assert line == {"a": None, "b": {"c": None, "d": 1.5}, "e": [1, None], "f": True, "non_finite": ["a", "b.c", "e.1"]}
    assert json.loads(encode_json({"deferred": {0: 3}, "path": Path("x/y")})) == {"deferred": {"0": 3}, "path": "x/y"}


def test_json_takes_numpy_scalars_and_names_what_it_cannot_take() -> None:
    numpy = pytest.importorskip("numpy")
    assert json.loads(encode_json({"a": numpy.float32(0.5), "b": numpy.int64(7)})) == {"a": 0.5, "b": 7}
    with pytest.raises(TypeError, match=r"outer\.inner: set"):
        encode_json({"outer": {"inner": {1}}})
