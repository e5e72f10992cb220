"""The run directory: one process at work, its records, checkpoints that are replaced whole."""

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest

from oppo_megatron.errors import CheckpointError, ConfigError, DataError
from oppo_megatron.rundir import disk, manifest
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.directory import RunDirectory, atomic_writer, encode_json, write_json, write_text
from oppo_megatron.rundir.disk import shortage, unwritten
from oppo_megatron.rundir.manifest import MANIFEST, OtherFormatError, find_misfits, read_manifest, require_whole


def test_a_finished_run_is_refused_and_untouched(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).prepare()
    run.metrics.write_text("{}\n")
    write_json(run.summary, {"steps": 1})
    with pytest.raises(ConfigError, match=r"(?s)run_dir.*finished run.*choose another") as error:
        RunDirectory(tmp_path).prepare()
    assert str(tmp_path) in str(error.value) and run.metrics.exists() and run.finished


def test_what_an_interrupted_run_measured_is_kept_aside(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for attempt in (1, 2):
        run.prepare()
        assert not run.metrics.exists()
        run.metrics.write_text(f"attempt {attempt}")
        run.rank_trace(0).write_text("")
    run.prepare()
    assert [(tmp_path / f"attempt-{n}" / "metrics.jsonl").read_text() for n in (1, 2)] == ["attempt 1", "attempt 2"]
    assert run.rank_traces() == []


def test_naming_a_run_touches_no_disk_traces_are_in_order_and_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be created"):
            RunDirectory(path).prepare()
    run = RunDirectory(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    assert run.prepare() is run and run.path.is_dir()
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
def test_a_second_start_awaits_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_s: float, begins: bool) -> None:
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


def test_json_of_all_numbers_and_what_it_cannot_take() -> None:
    line = json.loads(encode_json({"a": float("nan"), "b": {"c": float("-inf"), "d": 1.5}, "e": [1, float("inf")], "f": True}))
    assert line == {"a": None, "b": {"c": None, "d": 1.5}, "e": [1, None], "f": True, "non_finite": ["a", "b.c", "e.1"]}
    assert json.loads(encode_json({"deferred": {0: 3}, "path": Path("x/y")})) == {"deferred": {"0": 3}, "path": "x/y"}
    assert json.loads(encode_json({"a": numpy.float32(0.5), "b": numpy.int64(7)})) == {"a": 0.5, "b": 7}
    with pytest.raises(TypeError, match=r"outer\.inner: set"):
        encode_json({"outer": {"inner": {1}}})


def fill(folder: Path) -> Path:
    (folder / "models").mkdir(parents=True)
    (folder / "state.json").write_text('{"done": 3}')
    (folder / "models" / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    manifest.write_manifest(folder, manifest.seal(folder, manifest.list_files(folder)))
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(("damage", "words"), [(flip, "SHA-256"), (truncate, "bytes, but"), (Path.unlink, "is missing")])
@pytest.mark.parametrize("name", ["state.json", "models/__0_0.distcp"])
def test_damage_is_found_and_named(tmp_path: Path, damage: Callable[[Path], None], words: str, name: str) -> None:
    folder = fill(tmp_path / "c")
    require_whole(folder)
    damage(folder / name)
    with pytest.raises(CheckpointError, match=words) as error:
        require_whole(folder)
    assert name in str(error.value) and "resume from another checkpoint" in str(error.value)
    shares = [manifest.find_damage(folder, read_manifest(folder), part, 2) for part in range(2)]
    assert sum(share is not None for share in shares) == 1, "each file is one rank's to look at"


@pytest.mark.parametrize("damage", [Path.unlink, truncate, lambda path: path.write_text('{"format": "2", "files": {}}')])
def test_a_folder_without_a_readable_manifest_is_no_checkpoint(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = fill(tmp_path / "c")
    damage(folder / MANIFEST)
    with pytest.raises(CheckpointError, match="resume from") as error:
        require_whole(folder)
    assert not isinstance(error.value, OtherFormatError)


@pytest.mark.parametrize("name", ["../outside", "/etc/hosts", "models/../../x", "a\nb"])
def test_a_manifest_names_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    folder = fill(tmp_path / "c")
    tree = json.loads((folder / MANIFEST).read_text())
    tree["files"][name] = tree["files"]["state.json"]
    (folder / MANIFEST).write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match="is not a file of its folder"):
        read_manifest(folder)


def test_files_that_the_manifest_lacks_or_does_not_list_are_named(tmp_path: Path) -> None:
    folder = fill(tmp_path / "c")
    entries = read_manifest(folder)
    assert find_misfits(folder, entries, ("state.json",), ("models",)) is None
    assert find_misfits(folder, entries, ("rollouts.jsonl",), ()) == "its manifest does not have rollouts.jsonl"
    (folder / "notes.txt").write_text("a user's")
    (folder / "models" / "stray").write_text("of another writer")
    assert find_misfits(folder, entries, (), ("caches",)) is None
    assert find_misfits(folder, entries, (), ("models",)) == "models/stray is not in its manifest"


@pytest.mark.parametrize("written", [2, 99])
def test_one_of_another_version_is_not_damaged(tmp_path: Path, written: int) -> None:
    folder = fill(tmp_path / "c")
    (folder / MANIFEST).write_text(f'{{"format": {written}, "files": {{}}}}')
    with pytest.raises(OtherFormatError, match=f"format {written}, .* reads format 4; resume with the version that wrote it"):
        require_whole(folder)


def test_what_is_half_written_or_not_named_as_ours_is_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.positions() == []
    aside = store.begin(Position(1))
    (aside / "half").write_text("x")
    assert store.positions() == []
    aside = store.begin(Position(2))
    assert not store.aside(Position(1)).exists() and list(aside.iterdir()) == []
    store.commit(Position(2))
    assert store.positions() == [Position(2)] and not aside.exists()
    for name in ("step-7", "step-000003 (copy)", "step-000003-clock-5", "step-٠٠٠٠٠٣", "damaged-step-000002"):
        fill(tmp_path / name)
    assert CheckpointStore(tmp_path).positions() == []


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    order = [Position(1), Position(2), Position(2, 90), Position(2, 100), Position(3), Position(11)]
    for position in order:
        store.begin(position)
        store.commit(position)
    (tmp_path / "notes").mkdir()
    assert store.positions() == order == sorted(order, key=lambda p: p.name)
    assert [Position.of(position.name) for position in order] == order and Position.of("notes") is None
    assert store.prune(2, best=Position(2)) == [Position(1), Position(2, 90), Position(2, 100)]
    assert store.positions() == [Position(2), Position(3), Position(11)]


def test_a_resumed_run_replaces_what_it_writes_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for text in ("first", "second"):
        (store.begin(Position(1)) / "f").write_text(text)
        store.commit(Position(1))
    assert (store.folder(Position(1)) / "f").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("moment", range(6))
def test_killed_at_any_moment_of_a_replacement_one_of_both_is_there(tmp_path: Path, moment: int) -> None:
    """The process ends before its `moment`-th change of a name: `commit` has two of them, and `prune` one."""
    store, position = CheckpointStore(tmp_path), Position(1)
    for number, text in enumerate(("old", "first")):
        (store.begin(Position(number)) / "f").write_text(text)
        store.commit(Position(number))
    changes = [0]

    class Killed(BaseException):
        pass

    def mortal(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if changes[0] == moment:
                raise Killed
            changes[0] += 1
            return work(*args, **options)

        return call

    (store.begin(position) / "f").write_text("second")
    with (
        mock.patch.object(Path, "rename", mortal(Path.rename)), mock.patch.object(shutil, "rmtree", mortal(shutil.rmtree)),
        contextlib.suppress(Killed),
    ):  # fmt: skip
        store.commit(position)
        store.prune(1)
    assert changes[0] == min(moment, 5)
    assert position in store.positions(), "no moment without a checkpoint"
    store.recover()
    assert (store.folder(position) / "f").read_text() == ("first" if moment < 2 else "second")
    assert {path.name for path in tmp_path.iterdir()} <= {"step-000000", "step-000001"}
    assert store.positions() == ([Position(0), position] if moment < 4 else [position])


def test_the_error_of_a_full_disk_says_what_is_needed_and_what_is_left(tmp_path: Path) -> None:
    error = unwritten(tmp_path / ".step-000004", "rank 1: No space left on device", 3 * 2**20, "step-000003")
    for words in (".step-000004", "rank 1: No space", "about 3.0 MB", "are free", "--resume", "is step-000003"):
        assert words in str(error)
    assert shortage(tmp_path / "not" / "yet", 1) is None
    warning = shortage(tmp_path, 2**70)
    assert str(tmp_path) in warning and "checkpoint.keep" in warning


def test_a_damaged_checkpoint_is_set_aside_and_an_unwritten_one_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(Position(1))
    store.commit(Position(1))
    store.set_aside(Position(1))
    (store.begin(Position(2)) / "f").write_text("x")
    store.abandon(Position(2))
    assert store.positions() == [] and [path.name for path in tmp_path.iterdir()] == ["damaged-step-000001"]
