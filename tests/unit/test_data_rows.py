"""Files of rows: their form is told from their content, each row keeps its line, and nothing is dropped in silence."""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from oppo_megatron.config.data import DataConfig
from oppo_megatron.data.rows import Quarantine, Row, RowProblems, read_rows
from oppo_megatron.data.values import read_value
from oppo_megatron.errors import ConfigError, DataError, RewardError
from oppo_megatron.rewards.rule_parts import column as expected_column

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: it is of the extras `parquet` and `test`")
pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed with Parquet")
ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "answer": "2"}, {"prompt": 'two\nlines, "quoted"', "answer": "é"}, {"prompt": "last", "answer": ""},
]  # fmt: skip


def read_all(path: Path | list[Path], **settings: Any) -> tuple[list[Row], RowProblems, Quarantine]:
    problems = RowProblems(Quarantine())
    return read_rows(DataConfig(path=path, **settings), problems), problems, problems.quarantine


def read(path: Path | list[Path], **settings: Any) -> tuple[list[Row], Quarantine]:
    rows, problems, quarantine = read_all(path, **settings)
    problems.raise_errors()
    return rows, quarantine


def jsonl() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def table(delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(ROWS[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def parquet(*columns: Any, names: Sequence[str] = ()) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names) if names else pyarrow.Table.from_pylist(ROWS), sink)
    return sink.getvalue().to_pybytes()


def encrypted(*, footer: bool) -> bytes:
    """A column's values are encrypted, and with `footer` also the description of the file."""
    library = pytest.importorskip("pyarrow.parquet.encryption", reason="pyarrow is built without encryption")

    class Keys(library.KmsClient):  # type: ignore[name-defined, misc]
        def wrap_key(self, key: bytes, name: str) -> bytes:
            return key

    settings = library.EncryptionConfiguration("a", column_keys={"b": ["prompt"]}, plaintext_footer=not footer)
    factory = library.CryptoFactory(lambda _: Keys())
    properties, sink = factory.file_encryption_properties(library.KmsConnectionConfig(), settings), pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink, encryption_properties=properties)
    return sink.getvalue().to_pybytes()


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


WRITTEN: dict[str, tuple[Callable[[], bytes], list[int]]] = {
    "rows.jsonl": (jsonl, [1, 2, 3]), "array.json": (lambda: json.dumps(ROWS, indent=2).encode(), [2, 6, 10]),
    "array.jsonl": (lambda: json.dumps(ROWS).encode(), [1, 1, 1]),
    "array-a-row-a-line.jsonl": (lambda: b"[" + b",\n".join(json.dumps(row).encode() for row in ROWS) + b"]\n", [1, 2, 3]),
    "with-a-mark.json": (lambda: b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=2).encode(), [3, 7, 11]),
    "objects-over-lines.json": (lambda: b"\n".join(json.dumps(row, indent=1).encode() for row in ROWS), [1, 5, 9]),
    "rows.csv": (lambda: table(","), [2, 3, 5]), "rows-by-semicolon.csv": (lambda: table(";"), [2, 3, 5]),
    "rows.tsv": (lambda: table("\t"), [2, 3, 5]), "a-table.jsonl": (lambda: table(","), [2, 3, 5]),
    "rows.csv.gz": (lambda: gzip.compress(table(",")), [2, 3, 5]), "rows.parquet": (parquet, [1, 2, 3]),
    "parquet.jsonl": (parquet, [1, 2, 3]), "rows.parquet.gz": (lambda: gzip.compress(parquet()), [1, 2, 3]),
    "rows.jsonl.gz": (lambda: gzip.compress(jsonl()), [1, 2, 3]), "gzip.jsonl": (lambda: gzip.compress(jsonl()), [1, 2, 3]),
    "rows.jsonl.xz": (lambda: lzma.compress(jsonl()), [1, 2, 3]), "rows.jsonl.bz2": (lambda: bz2.compress(jsonl()), [1, 2, 3]),
    "rows.jsonl.zst": (lambda: zstd(jsonl()), [1, 2, 3]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_file_is_written_in_is_told_from_its_content(tmp_path: Path, name: str) -> None:
    content, lines = WRITTEN[name]
    path = tmp_path / name
    path.write_bytes(content())
    rows, _ = read(path)
    assert [row.values for row in rows] == ROWS and [row.line for row in rows] == lines
    assert [row.index for row in rows] == [0, 1, 2] and {row.file for row in rows} == {str(path)}


def test_bad_rows_of_archives_arrays_and_tables_are_set_aside_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"  # the first row is longer than what is looked at
    path.write_bytes(gzip.compress(json.dumps({"prompt": "x" * 300_000}).encode() + b'\n{"prompt": "cut off\n{"prompt": "c"}\n'))
    rows, quarantine = read(path, bad_rows="quarantine")
    assert [row.line for row in rows] == [1, 3] and [entry["line"] for entry in quarantine.entries] == [2]
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
    "an array that is cut": ("a.json", b'[\n{"prompt": "a"},\n{"prompt": "b"', r"a\.json:3: not JSON .*write each object"),
    "an array without a comma": ("a.json", b'[\n{"prompt": "a"}\n{"prompt": "b"},\n]', r"a\.json:3: the array has no comma"),
    "two arrays": ("a.json", b'[\n{"prompt": "a"}\n]\n[\n{"prompt": "b"}\n]', "there is more after the array's ]"),
    "an array that is not UTF-8": ("a.json", b'[\n{"prompt": "\xe9"}\n]', r"a\.json:2: not UTF-8 .*save the file as UTF-8"),
    "a cut gzip": ("a.jsonl.gz", gzip.compress(jsonl())[:-12], "compressed, and damaged .*fetch or write it again"),
    "a cut xz": ("a.jsonl.xz", lzma.compress(jsonl())[:-30], "compressed, and damaged"),
    "a cut Parquet file": ("a.parquet", parquet()[:-9], "a Parquet file that cannot be read .*fetch it again"),
    "an encrypted Parquet file": ("a.parquet", encrypted(footer=True), "a Parquet file that is encrypted; decrypt it"),
    "an encrypted column": ("a.parquet", encrypted(footer=False), "a Parquet file that is encrypted; decrypt it"),
    "an encrypted message": ("a.jsonl", b"-----BEGIN PGP MESSAGE-----\n\nhQEM", "a.jsonl is encrypted; decrypt it"),
    "two columns of a name": ("a.parquet", parquet(pyarrow.array(["a"]), pyarrow.array(["b"]), names=["prompt"] * 2),
        "two columns have one name; rename one"),
    "a time of nanoseconds": ("a.parquet", parquet(pyarrow.array([1], pyarrow.time64("ns")), names=["at"]),
        "a time after row 0 is none of Python's"),
    "an open quotation mark": ("a.csv", b'prompt,answer\na,b\n"c,d\n', r"a\.csv:3: not CSV .*close its quotation marks"),
    "a column twice": ("a.csv", b"prompt,prompt\na,b\n", "'prompt' comes twice in the header; rename"),
    "a header only": ("a.csv", b"prompt,answer\n", "holds no row"), "an empty array": ("a.json", b"[]", "holds no row"),
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


def test_patterns_and_folders_name_several_files_and_of_splits_train_is_read(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json", "c.txt"):
        (tmp_path / name).write_bytes(jsonl())
    for path in (tmp_path, tmp_path / "[ab].json*", tmp_path / "**" / "*.json*"):
        rows, _ = read(path)
        assert [Path(row.file).name for row in rows] == ["a.json"] * 3 + ["b.jsonl"] * 3
        assert [row.index for row in rows] == list(range(6))
    with pytest.raises(ConfigError, match="is a pattern that no file matches.*looked from"):
        read(tmp_path / "*.parquet")
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

    for column in ("day", "at", "clock"):
        with pytest.raises(DataError, match=rf"column '{column}' is a time or an identifier \(.*\), and not text; name another"):
            read_value(read_row, column)
        with pytest.raises(RewardError, match=f"column '{column}' is a time"):
            expected_column(read_row.values, column)
    for value, says in ((b"\x89PNG\xff", "'image' has bytes that"), (float("inf"), "'image' is infinite")):  # no JSON
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "image": [value, None]}), path)
        with pytest.raises(DataError, match=f":1: column {says}"):
            read(path)
        rows, quarantine = read(path, bad_rows="quarantine")
        assert [row.index for row in rows] == [1] and len(quarantine) == 1


BAD_FILE = b"\n".join([
    b'{"prompt": "fine"}', b'{"prompt": "cut off', b"[1, 2]", b'{"prompt": "caf\xe9"}', b"", b'{"prompt": NaN}', b"[" * 100_000,
    b'{"prompt": "also fine"}', b"", b"",
])  # fmt: skip
BAD_LINES = [2, 3, 4, 5, 6, 7]


def test_good_rows_keep_file_line_and_every_column(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": "x\xe2\x80\xa8y"}\r\n')
    two.write_text('{"b": [1]}')
    rows, _, quarantine = read_all([one, two])
    assert [(row.index, row.file, row.line, row.values) for row in rows] == [
        (0, str(one), 1, {"a": 1}), (1, str(one), 2, {"a": "x\u2028y"}), (2, str(two), 1, {"b": [1]}),
    ]  # fmt: skip
    assert len(quarantine) == 0 and [row.line for row in read([one, two, one], max_rows=4)[0]] == [1, 2, 1, 1]


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
    rows, _, quarantine = read_all(path, bad_rows="quarantine")
    assert [row.values["prompt"] for row in rows] == ["fine", "\U0001f600 \\u0000"]
    (entry,) = (entry for entry in quarantine.entries if entry["line"] == 2)
    assert re.search(reason, entry["reason"]), entry["reason"]
    quarantine.write(tmp_path / "quarantine.jsonl")
    assert json.loads((tmp_path / "quarantine.jsonl").read_text().splitlines()[0]) == entry


def test_all_bad_rows_are_in_one_error_or_set_aside_and_written(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(BAD_FILE)
    rows, problems, _ = read_all(path)
    assert [row.line for row in rows] == [1, 8]
    with pytest.raises(DataError) as caught:
        problems.raise_errors()
    message = str(caught.value)
    assert message.startswith("6 rows") and [line for line in range(1, 11) if f"{path}:{line}:" in message] == BAD_LINES
    for reason in ("not JSON", "a JSON list", "not UTF-8", "blank", "NaN", "data.bad_rows=quarantine"):
        assert reason in message
    rows, quarantine = read(path, bad_rows="quarantine")
    assert [row.index for row in rows] == [0, 7], "the index counts refused rows"
    quarantine.write(tmp_path / "run" / "quarantine.jsonl")
    written = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in written] == BAD_LINES
    assert all(entry["file"] == str(path) and entry["reason"] for entry in written)


def test_the_first_twenty_are_shown_all_are_counted_and_to_have_no_others_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "x"}\n' + "nonsense\n" * 31)
    with pytest.raises(DataError, match="^31 rows cannot be used, the first 20 are shown") as caught:
        read(path)
    assert str(caught.value).count(f"{path}:") == 20
    path.write_text("nonsense\n")
    with pytest.raises(DataError, match="1 row cannot be used"):
        read_all(path)
    with pytest.raises(DataError, match="all 1 rows were set aside.*not JSON"):
        read_all(path, bad_rows="quarantine")


def test_missing_empty_and_wrong_places(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(DataError, match="holds no row"):
        read_all(empty)
    with pytest.raises(ConfigError) as caught:
        read_all([tmp_path / "one", empty, tmp_path / "two"])
    assert len(caught.value.problems) == 2
    assert all(name in problem for name, problem in zip(("one", "two"), caught.value.problems, strict=True))
    with pytest.raises(DataError, match="holds no row"):
        read_all(tmp_path)
    full, part = tmp_path / "full.jsonl", tmp_path / "part.parquet"
    full.write_bytes(jsonl())
    part.write_bytes(parquet(pyarrow.array([], pyarrow.string()), names=["prompt"]))
    assert read([full, empty, part])[1].notes == [f"{empty} holds no row", f"{part} holds no row"]
    assert read([full, full], max_rows=3)[1].notes == [], "the second is not read"
    full.unlink()
    part.unlink()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "README.md").write_text("rows")
    with pytest.raises(DataError, match=r"not a saved Hugging Face data set.*no file in it ends with \.jsonl"):
        read_all(tmp_path / "folder")
    with pytest.raises(ConfigError, match="does not exist; did you mean `.*empty.jsonl`"):
        read_all(tmp_path / "empty.json")
    with pytest.raises(ConfigError, match="empty list"):
        read_all([])
    with pytest.raises(ConfigError, match=r"`datasets.load_dataset\('Org/set'\).save_to_disk\('set'\)`"):
        read(Path("Org/set"))


def test_hugging_face_directory_and_its_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install"):
        read_all(tmp_path)
    (tmp_path / "state.json").unlink()
    (tmp_path / "dataset_dict.json").write_text("{}")
    splits = {"train": [{"prompt": "a"}, {"prompt": "b"}], "test": [{"prompt": "c"}]}
    package = types.ModuleType("datasets")
    package.load_from_disk = lambda path: splits
    monkeypatch.setitem(sys.modules, "datasets", package)
    rows, _, _ = read_all(tmp_path)
    assert [(row.line, row.values["prompt"]) for row in rows] == [(1, "a"), (2, "b")]

    def damaged() -> Iterator[dict[str, str]]:
        yield {"prompt": "a"}
        raise OSError("Truncated")

    package.load_from_disk = lambda path: damaged()
    with pytest.raises(DataError, match="cannot be read .Truncated"):
        read_all(tmp_path)
    package.load_from_disk = lambda path: splits
    splits["other"] = splits.pop("train")
    with pytest.raises(DataError, match="splits test, other"):
        read_all(tmp_path)
