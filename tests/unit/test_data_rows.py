"""Rows: what is read, what is refused, and that nothing is dropped in silence."""

from __future__ import annotations

import gzip
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from oppo_megatron.config.data import DataConfig
from oppo_megatron.data.rows import Quarantine, RowProblems, read_rows
from oppo_megatron.errors import ConfigError, DataError

BAD_FILE = b"\n".join(
    [
        b'{"prompt": "fine"}',
        b'{"prompt": "cut off',
        b"[1, 2]",
        b'{"prompt": "caf\xe9"}',
        b"",
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"prompt": "also fine"}',
        b"",
        b"",
    ]
)
BAD_LINES = [2, 3, 4, 5, 6, 7]


def read(path, **settings):
    quarantine = Quarantine()
    problems = RowProblems(quarantine)
    return read_rows(DataConfig(path=path, **settings), problems), problems, quarantine


def test_good_rows_keep_file_line_and_every_column(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": "x\xe2\x80\xa8y"}\r\n')
    two.write_text('{"b": [1]}')
    rows, _, quarantine = read([one, two])
    assert [(row.index, row.file, row.line, row.values) for row in rows] == [
        (0, str(one), 1, {"a": 1}),
        (1, str(one), 2, {"a": "x\u2028y"}),
        (2, str(two), 1, {"b": [1]}),
    ]
    assert len(quarantine) == 0


FAULTS = {
    "NUL byte": (b'{"prompt": "a\0b"}', r"a NUL byte \(byte 13 of the line\)"),
    "NUL escape": (rb'{"prompt": "a\u0000b"}', r"column 'prompt' has a NUL at character 1"),
    "NUL in another column": (rb'{"prompt": "a", "meta": [{"k\u0000": 1}]}', r"column 'meta' has a NUL"),
    "half a pair": (rb'{"prompt": "ab\ud83d"}', r"column 'prompt' is not text: half of a surrogate pair at character 2"),
    "half a pair as a name": (rb'{"prompt": "a", "\udc00": 1}', r"half of a surrogate pair at character 0"),
    "mark in the middle": (b'\xef\xbb\xbf{"prompt": "a"}', "a byte order mark, which only the first line"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "UTF-16, by its byte order mark"),
    "UTF-16 without a mark": ('{"prompt": "a"}'.encode("utf-16-le"), "a NUL byte"),
    "Latin-1": (b'{"prompt": "\xe9"}', r"not UTF-8 \(byte 12 of the line\)"),
    "cut in a character": (b'{"prompt": "\xf0\x9f"}', "not UTF-8"),
    "too large a number": (b'{"prompt": "a", "answer": 1e999}', "1e999 is not a finite number"),
    "nested too deeply": (b'{"prompt": "a", "x": ' + b"[" * 101 + b"]" * 101 + b"}", "nested deeper than 100"),
    "gzip": (gzip.compress(b'{"prompt": "a"}', mtime=0).replace(b"\n", b""), "compressed by gzip; unpack"),
    "a name twice": (b'{"prompt": "a", "prompt": "b"}', "the name 'prompt' comes twice in one object"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_characters_is_named_by_its_line(tmp_path: Path, fault: str) -> None:
    line, reason = FAULTS[fault]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b'\n{"prompt": "\\ud83d\\ude00 \\\\u0000"}\n')
    rows, _, quarantine = read(path, bad_rows="quarantine")
    assert [row.values["prompt"] for row in rows] == ["fine", "\U0001f600 \\u0000"]
    (entry,) = (entry for entry in quarantine.entries if entry["line"] == 2)
    assert re.search(reason, entry["reason"]), entry["reason"]
    quarantine.write(tmp_path / "quarantine.jsonl")
    assert json.loads((tmp_path / "quarantine.jsonl").read_text().splitlines()[0]) == entry


def test_all_bad_rows_are_in_one_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(BAD_FILE)
    rows, problems, _ = read(path)
    assert [row.line for row in rows] == [1, 8]
    with pytest.raises(DataError) as caught:
        problems.raise_errors()
    message = str(caught.value)
    assert message.startswith("6 rows")
    assert [line for line in range(1, 11) if f"{path}:{line}:" in message] == BAD_LINES
    for reason in ("not JSON", "a JSON list", "not UTF-8", "blank", "NaN", "data.bad_rows=quarantine"):
        assert reason in message


def test_bad_rows_can_be_set_aside_and_written(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(BAD_FILE)
    rows, problems, quarantine = read(path, bad_rows="quarantine")
    problems.raise_errors()
    assert [row.index for row in rows] == [0, 7], "the index counts refused rows"
    quarantine.write(tmp_path / "run" / "quarantine.jsonl")
    written = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in written] == BAD_LINES
    assert all(entry["file"] == str(path) and entry["reason"] for entry in written)


def test_only_the_first_twenty_are_shown_and_all_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "x"}\n' + "nonsense\n" * 31)
    _, problems, _ = read(path)
    with pytest.raises(DataError, match="^31 rows cannot be used, the first 20 are shown") as caught:
        problems.raise_errors()
    assert str(caught.value).count(f"{path}:") == 20


def test_a_file_of_bad_rows_only_is_an_error_under_both_policies(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("nonsense\n")
    with pytest.raises(DataError, match="1 row cannot be used"):
        read(path)
    with pytest.raises(DataError, match="all 1 rows were set aside.*not JSON"):
        read(path, bad_rows="quarantine")


def test_max_rows_counts_over_files(tmp_path: Path) -> None:
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path in paths:
        path.write_text('{"a": 1}\n{"a": 2}\n')
    rows, _, _ = read(paths, max_rows=3)
    assert [row.line for row in rows] == [1, 2, 1]


def test_missing_empty_and_wrong_places(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(DataError, match="holds no row"):
        read(empty)
    with pytest.raises(ConfigError) as caught:
        read([tmp_path / "one", empty, tmp_path / "two"])
    assert len(caught.value.problems) == 2
    assert all(name in problem for name, problem in zip(("one", "two"), caught.value.problems, strict=True))
    with pytest.raises(DataError, match="holds no row"):
        read(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("rows")
    with pytest.raises(DataError, match=r"not a saved Hugging Face data set.*no file in it ends with \.jsonl"):
        read(tmp_path / "folder")
    with pytest.raises(ConfigError, match="empty list"):
        read([])


def test_hugging_face_directory_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install"):
        read(tmp_path)


def test_hugging_face_directory_and_its_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    splits = {"train": [{"prompt": "a"}, {"prompt": "b"}], "test": [{"prompt": "c"}]}
    package = types.ModuleType("datasets")
    package.load_from_disk = lambda path: splits
    monkeypatch.setitem(sys.modules, "datasets", package)
    rows, _, _ = read(tmp_path)
    assert [(row.line, row.values["prompt"]) for row in rows] == [(1, "a"), (2, "b")]

    def damaged() -> Iterator[dict[str, str]]:
        yield {"prompt": "a"}
        raise OSError("Truncated")

    package.load_from_disk = lambda path: damaged()
    with pytest.raises(DataError, match="cannot be read .Truncated"):
        read(tmp_path)
    package.load_from_disk = lambda path: splits
    splits["other"] = splits.pop("train")
    with pytest.raises(DataError, match="splits test, other"):
        read(tmp_path)
