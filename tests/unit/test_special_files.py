"""A pipe or a socket where a file is read: said at once, and not waited for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from oppo_megatron.cli.main import main
from oppo_megatron.config.data import TokenizerConfig
from oppo_megatron.config.load import read_tree
from oppo_megatron.config.paths import check_files, irregular_path
from oppo_megatron.data.files import file_rows
from oppo_megatron.data.tokenizer import load_tokenizer
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.rundir.directory import RunDirectory
from tests.support.runs import write_run

REMEDY = "remove it, or put what the run wrote in its place"


def pipe(path: Path) -> None:
    """A pipe that is held open for writing: to read it waits."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["summary.json", "config.yaml", "hosts.json", "metrics.jsonl", "trace.json"])
@pytest.mark.parametrize("typed", [("report",), ("report", "--watch")], ids="".join)
def test_a_pipe_in_a_run_directory(name: str, typed: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run")
    pipe(tmp_path / "run" / name)
    assert main([*typed, str(tmp_path / "run")]) == 2
    assert f"{tmp_path / 'run' / name}` is a pipe, and not a regular file; {REMEDY}" in capsys.readouterr().err


def test_a_run_does_not_begin_beside_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("summary.json")
        with pytest.raises(ConfigError, match=f"`summary.json` is a socket, .*{REMEDY}"):
            RunDirectory(".").require_own()


def test_a_pipe_as_a_configuration_and_as_rows(tmp_path: Path) -> None:
    path = tmp_path / "given"
    pipe(path)
    said = "is a pipe, and not a regular file; write its content to a file, and name that"
    with pytest.raises(ConfigError, match=said):
        read_tree(path)
    with pytest.raises(DataError, match=said):
        list(file_rows(path))
    assert [said in problem for problem in check_files("data.path", path)] == [True]


def test_a_pipe_among_the_files_of_a_tokenizer(tmp_path: Path) -> None:
    pipe(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="tokenizer.json` is a pipe"):
        load_tokenizer(TokenizerConfig(path=tmp_path))


def test_files_folders_and_what_is_missing_are_no_such(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not any(irregular_path("it", tmp_path / name) for name in ("file", ".", "missing"))
    assert "is a device" in (irregular_path("it", Path(os.devnull)) or "")


def test_a_pipe_among_the_files_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    pipe(tmp_path / "model" / "config.json")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--to", "megatron"]) == 2
    assert "config.json` is a pipe, and not a regular file; write its content to a file, and name that" in capsys.readouterr().err
