"""Checkpoints as files: damage of every kind is found and named, names stand for whole folders only, the oldest go."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from oppo_megatron.errors import CheckpointError
from oppo_megatron.rundir.checkpoints import CheckpointStore, Position
from oppo_megatron.rundir.disk import shortage, unwritten
from oppo_megatron.rundir.manifest import (
    MANIFEST,
    OtherFormatError,
    find_damage,
    find_misfits,
    list_files,
    read_manifest,
    require_whole,
    seal,
    write_manifest,
)


def fill(folder: Path) -> Path:
    (folder / "models").mkdir(parents=True)
    (folder / "state.json").write_text('{"done": 3}')
    (folder / "models" / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    write_manifest(folder, seal(folder, list_files(folder)))
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


DAMAGES: list[tuple[Callable[[Path], None], str]] = [(flip, "SHA-256"), (truncate, "bytes, but"), (remove, "is missing")]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
@pytest.mark.parametrize("name", ["state.json", "models/__0_0.distcp"])
def test_damage_is_found_and_named(tmp_path: Path, damage: Callable[[Path], None], words: str, name: str) -> None:
    folder = fill(tmp_path / "c")
    require_whole(folder)
    damage(folder / name)
    with pytest.raises(CheckpointError, match=words) as error:
        require_whole(folder)
    assert name in str(error.value) and "resume from another checkpoint" in str(error.value)
    shares = [find_damage(folder, read_manifest(folder), part, 2) for part in range(2)]
    assert sum(share is not None for share in shares) == 1, "each file is one rank's to look at"


@pytest.mark.parametrize("damage", [remove, truncate, lambda path: path.write_text('{"format": "2", "files": {}}')])
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


def test_what_is_half_written_has_no_checkpoints_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.positions() == []
    aside = store.begin(Position(1))
    (aside / "half").write_text("x")
    assert store.positions() == []
    aside = store.begin(Position(2))
    assert not store.aside(Position(1)).exists() and list(aside.iterdir()) == []
    store.commit(Position(2))
    assert store.positions() == [Position(2)] and not aside.exists()


def test_what_is_not_named_as_we_name_them_is_no_checkpoint(tmp_path: Path) -> None:
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
    for text in ("old", "first"):
        (store.begin(Position(0 if text == "old" else 1)) / "f").write_text(text)
        store.commit(Position(0 if text == "old" else 1))
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
        mock.patch.object(Path, "rename", mortal(Path.rename)),
        mock.patch.object(shutil, "rmtree", mortal(shutil.rmtree)),
        contextlib.suppress(Killed),
    ):
        store.commit(position)
        store.prune(1)
    assert changes[0] == min(moment, 5)
    assert position in store.positions(), "no moment without a checkpoint"
    store.recover()
    text = (store.folder(position) / "f").read_text()
    assert text == ("first" if moment < 2 else "second")
    assert {path.name for path in tmp_path.iterdir()} <= {"step-000000", "step-000001"}
    assert store.positions() == ([Position(0), position] if moment < 4 else [position])


def test_the_error_of_a_full_disk_says_what_is_needed_and_what_is_left(tmp_path: Path) -> None:
    error = unwritten(tmp_path / ".step-000004", "rank 1: No space left on device", 3 * 2**20, "step-000003")
    for words in (".step-000004", "rank 1: No space", "about 3.0 MB", "are free", "--resume", "is step-000003"):
        assert words in str(error)
    assert shortage(tmp_path / "not" / "yet", 1) is None
    warning = shortage(tmp_path, 2**70)
    assert warning is not None and str(tmp_path) in warning and "checkpoint.keep" in warning


def test_a_damaged_checkpoint_is_set_aside_and_an_unwritten_one_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.begin(Position(1))
    store.commit(Position(1))
    store.set_aside(Position(1))
    (store.begin(Position(2)) / "f").write_text("x")
    store.abandon(Position(2))
    assert store.positions() == [] and [path.name for path in tmp_path.iterdir()] == ["damaged-step-000001"]
