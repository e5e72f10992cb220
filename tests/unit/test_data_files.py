"""Files of rows: what they are written in is told from their content, and each row keeps the line it begins on."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import DataConfig
from oppo_megatron.data.rows import Quarantine, Row, RowProblems, read_rows
from oppo_megatron.errors import ConfigError, DataError

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: it is of the extras `parquet` and `test`")
pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed with Parquet")
ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "answer": "2"},
    {"prompt": 'two\nlines, "quoted"', "answer": "é"},
    {"prompt": "last", "answer": ""},
]


def read(path: Path | list[Path], **settings: Any) -> tuple[list[Row], Quarantine]:
    quarantine = Quarantine()
    problems = RowProblems(quarantine)
    rows = read_rows(DataConfig(path=path, **settings), problems)
    problems.raise_errors()
    return rows, quarantine


def jsonl() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def table(delimiter: str) -> bytes:
    import io

    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(ROWS[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def two_columns(name: str, values: Any) -> bytes:
    sink = pyarrow.BufferOutputStream()
    columns = [pyarrow.array(["a"]), values]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=["prompt", name]), sink)
    return bytes(sink.getvalue())


def parquet() -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink)
    return sink.getvalue().to_pybytes()


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


WRITTEN: dict[str, tuple[Callable[[], bytes], list[int]]] = {
    "rows.jsonl": (jsonl, [1, 2, 3]),
    "array.json": (lambda: json.dumps(ROWS, indent=2).encode(), [2, 6, 10]),
    "array.jsonl": (lambda: json.dumps(ROWS).encode(), [1, 1, 1]),
    "array-a-row-a-line.jsonl": (lambda: b"[" + b",\n".join(json.dumps(row).encode() for row in ROWS) + b"]\n", [1, 2, 3]),
    "with-a-mark.json": (lambda: b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=2).encode(), [3, 7, 11]),
    "objects-over-lines.json": (lambda: b"\n".join(json.dumps(row, indent=1).encode() for row in ROWS), [1, 5, 9]),
    "rows.csv": (lambda: table(","), [2, 3, 5]),
    "rows-by-semicolon.csv": (lambda: table(";"), [2, 3, 5]),
    "rows.tsv": (lambda: table("\t"), [2, 3, 5]),
    "a-table.jsonl": (lambda: table(","), [2, 3, 5]),
    "rows.csv.gz": (lambda: gzip.compress(table(",")), [2, 3, 5]),
    "rows.parquet": (parquet, [1, 2, 3]),
    "parquet.jsonl": (parquet, [1, 2, 3]),
    "rows.parquet.gz": (lambda: gzip.compress(parquet()), [1, 2, 3]),
    "rows.jsonl.gz": (lambda: gzip.compress(jsonl()), [1, 2, 3]),
    "gzip.jsonl": (lambda: gzip.compress(jsonl()), [1, 2, 3]),
    "rows.jsonl.xz": (lambda: lzma.compress(jsonl()), [1, 2, 3]),
    "rows.jsonl.bz2": (lambda: bz2.compress(jsonl()), [1, 2, 3]),
    "rows.jsonl.zst": (lambda: zstd(jsonl()), [1, 2, 3]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_file_is_written_in_is_told_from_its_content(tmp_path: Path, name: str) -> None:
    content, lines = WRITTEN[name]
    path = tmp_path / name
    path.write_bytes(content())
    rows, _ = read(path)
    assert [row.values for row in rows] == ROWS
    assert [row.line for row in rows] == lines
    assert [row.index for row in rows] == [0, 1, 2] and {row.file for row in rows} == {str(path)}


def test_a_first_row_longer_than_what_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"prompt": "x" * 300_000}).encode() + b'\n{"prompt": "cut off\n{"prompt": "c"}\n'))
    rows, quarantine = read(path, bad_rows="quarantine")
    assert [row.line for row in rows] == [1, 3] and [entry["line"] for entry in quarantine.entries] == [2]


def test_bad_rows_of_arrays_and_tables_are_set_aside_by_line(tmp_path: Path) -> None:
    array = tmp_path / "array.json"
    array.write_text('[\n{"prompt": "a"},\n5,\n{"prompt": "b", "prompt": "c"},\n{"prompt": "d"}\n]\n')
    rows, quarantine = read(array, bad_rows="quarantine")
    assert [row.line for row in rows] == [2, 5]
    assert [(entry["line"], entry["reason"][:12]) for entry in quarantine.entries] == [(3, "a JSON int, "), (4, "not JSON (th")]
    wide = tmp_path / "rows.csv"
    wide.write_bytes(b"prompt,answer\na,b\nc,d,e\n\nf\n\xe9,g\nh,i\n")
    rows, quarantine = read(wide, bad_rows="quarantine")
    assert [row.line for row in rows] == [2, 7]
    reasons = ["3 cells, but the header has 2", "1 cells, but the header has 2", "column 'prompt' is not UTF-8"]
    for entry, line, reason in zip(quarantine.entries, (3, 5, 6), reasons, strict=True):
        assert entry["line"] == line and entry["reason"].startswith(reason)


def test_messages_in_a_cell_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([["messages"], [json.dumps([{"role": "user", "content": "hi"}])], ["[1] a note {x}"]])
    rows, _ = read(path)
    assert [row.values["messages"] for row in rows] == [[{"role": "user", "content": "hi"}], "[1] a note {x}"]


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "an array that is cut": (
        "a.json", b'[\n{"prompt": "a"},\n{"prompt": "b"', r"a\.json:3: not JSON .*write each object"
    ),
    "an array without a comma": ("a.json", b'[\n{"prompt": "a"}\n{"prompt": "b"},\n]', r"a\.json:3: the array has no comma"),
    "two arrays": ("a.json", b'[\n{"prompt": "a"}\n]\n[\n{"prompt": "b"}\n]', "there is more after the array's ]"),
    "an array that is not UTF-8": ("a.json", b'[\n{"prompt": "\xe9"}\n]', r"a\.json:2: not UTF-8 .*save the file as UTF-8"),
    "a cut gzip": ("a.jsonl.gz", gzip.compress(jsonl())[:-12], "compressed, and damaged .*fetch or write it again"),
    "a cut xz": ("a.jsonl.xz", lzma.compress(jsonl())[:-30], "compressed, and damaged"),
    "a cut Parquet file": ("a.parquet", parquet()[:-9], "a Parquet file that cannot be read .*fetch it again"),
    "two columns of a name": ("a.parquet", two_columns("prompt", pyarrow.array(["b"])), "two columns have one name; rename one"),
    "a time of nanoseconds": (
        "a.parquet", two_columns("at", pyarrow.array([1], pyarrow.time64("ns"))), "a time after row 0 is none of Python's"
    ),
    "an open quotation mark": ("a.csv", b'prompt,answer\na,b\n"c,d\n', r"a\.csv:3: not CSV .*close its quotation marks"),
    "a column twice": ("a.csv", b"prompt,prompt\na,b\n", "'prompt' comes twice in the header; rename"),
    "a header only": ("a.csv", b"prompt,answer\n", "holds no row"),
    "an empty array": ("a.json", b"[]", "holds no row"),
    "a pointer of Git LFS": ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "a web page": ("a.jsonl", b"<!DOCTYPE html>\n<html></html>", "a web page; fetch the file itself"),
    "a zip archive": ("a.jsonl", b"PK\x03\x04" + b"\0" * 40, "zip archive .*unpack it"),
    "an Arrow file": ("a.arrow", b"ARROW1\0\0", r"save_to_disk|to_parquet"),
    "a pickle": ("a.pkl", b"\x80\x04\x95", "pickle, which is not read .*JSONL"),
    "a tar archive": ("a.tar", b"x" * 257 + b"ustar" + b"\0" * 250, "tar archive; unpack it"),
    "a database": ("a.db", b"SQLite format 3\0", "export the table as CSV"),
    "UTF-16 from a spreadsheet": ("a.csv", "prompt\tanswer\na\tb\n".encode("utf-16"), "UTF-16.*save the file as UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_file_that_is_damaged_or_no_file_of_rows(tmp_path: Path, fault: str) -> None:
    name, content, reason = BROKEN[fault]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){reason}"):
        read(tmp_path / name)


@pytest.mark.parametrize(("name", "content"), [("a.parquet", parquet()), ("a.jsonl.zst", zstd(jsonl()))])
def test_without_pyarrow_there_is_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="needs the `pyarrow` package: `pip install pyarrow`"):
        read(tmp_path / name)


def test_patterns_and_folders_name_several_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json", "c.txt"):
        (tmp_path / name).write_bytes(jsonl())
    for path in (tmp_path, tmp_path / "[ab].json*", tmp_path / "**" / "*.json*"):
        rows, _ = read(path)
        assert [Path(row.file).name for row in rows] == ["a.json"] * 3 + ["b.jsonl"] * 3
        assert [row.index for row in rows] == list(range(6))
    with pytest.raises(ConfigError, match="is a pattern that no file matches.*looked from"):
        read(tmp_path / "*.parquet")


def test_of_a_folder_with_splits_train_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"):
        (folder / name).write_bytes(jsonl())
    rows, quarantine = read(tmp_path / "set")
    assert [Path(row.file).name[:11] for row in rows] == ["train-00000"] * 3 + ["train-00001"] * 3
    assert "2 files of the split train are read, 1 of other splits are not" in quarantine.notes[0]
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"):
        (folder / name).rename(folder / name.replace("train", "validation"))
    with pytest.raises(DataError, match="files of the splits test, validation; name those to read"):
        read(tmp_path / "set")


def test_a_name_of_the_hub_is_told_how_to_be_fetched() -> None:
    with pytest.raises(ConfigError, match=r"`datasets.load_dataset\('Org/set'\).save_to_disk\('set'\)`"):
        read(Path("Org/set"))


def test_typed_values_are_read_as_json_has_them(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "prompt": b"caf\xc3\xa9", "day": date(2026, 11, 26), "at": datetime(2026, 11, 26, 1, 2, 3, tzinfo=timezone.utc),
        "clock": time(1, 2), "took": timedelta(seconds=1.5), "whole": Decimal("42.000"), "part": Decimal("0.1"),
        "long": Decimal("12345678901234567890.123"), "none": float("nan"), "nested": {"of": [float("nan"), 7.0]},
    }  # fmt: skip
    path = tmp_path / "rows.parquet"
    columns = {name: pyarrow.array([value]) for name, value in row.items()} | {
        "map": pyarrow.array([[("a", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    (read_row,), _ = read(path)
    assert json.loads(json.dumps(read_row.values, allow_nan=False)) == read_row.values
    assert read_row.values == {
        "prompt": "café", "day": "2026-11-26", "at": "2026-11-26T01:02:03+00:00", "clock": "01:02:00", "took": 1.5, "whole": 42,
        "part": 0.1, "long": "12345678901234567890.123", "none": None, "nested": {"of": [None, 7.0]}, "map": [["a", 1]],
    }  # fmt: skip


@pytest.mark.parametrize(("value", "says"), [(b"\x89PNG\xff", "'image' has bytes that"), (float("inf"), "'image' is infinite")])
def test_a_typed_value_that_is_no_json_is_a_bad_row(tmp_path: Path, value: Any, says: str) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "image": [value, None]}), path)
    with pytest.raises(DataError, match=f":1: column {says}"):
        read(path)
    rows, quarantine = read(path, bad_rows="quarantine")
    assert [row.index for row in rows] == [1] and len(quarantine) == 1
