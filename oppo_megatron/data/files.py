"""Files named by `data.path`. The first bytes decide the type; the name only whether other text is CSV."""

from __future__ import annotations

import bz2
import csv
import glob
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast

from oppo_megatron.config.data import KNOWN_NAMES
from oppo_megatron.config.paths import irregular_path
from oppo_megatron.data.json_rows import BOM, Numbered, check_texts, json_lines, json_values, plain_row, spans_lines
from oppo_megatron.errors import DataError
from oppo_megatron.nesting import check_value, read_json

ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")
PACKED = (".gz", ".xz", ".bz2", ".zst")
SAVED = ("state.json", "dataset_dict.json")
NOT_ROWS = ("dataset_info.json", "dataset_infos.json", *SAVED)
PEEKED_BYTES = 1 << 9
WEB_PAGE = "a web page; fetch the file itself (the link to the raw file), not the page that shows it"
ENCRYPTED = "encrypted; decrypt it, and name the decrypted file"
PICKLE = "a Python pickle, which is not read because it may run code; write the rows as JSONL"
FOREIGN: dict[bytes, str] = {
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself; fetch it with `git lfs pull`",
    b"<!DOCTYPE": WEB_PAGE,
    b"<!doctype": WEB_PAGE,
    b"<html": WEB_PAGE,
    b"PK\x03\x04": "a zip archive (or a spreadsheet, which is one); unpack it, or save the sheet as CSV",
    b"ARROW1": "an Arrow file; name the folder that `save_to_disk` wrote, or write Parquet (`Dataset.to_parquet`)",
    b"\xff\xff\xff\xff": "an Arrow stream; name the folder that `save_to_disk` wrote, which holds state.json",
    b"PARE": f"a Parquet file that is {ENCRYPTED}",
    b"-----BEGIN PGP": ENCRYPTED,
    b"age-encryption.org": ENCRYPTED,
    b"Salted__": ENCRYPTED,
    b"\x80\x04": PICKLE,
    b"\x80\x05": PICKLE,
    b"SQLite format 3": "an SQLite database; export the table as CSV",
}
SPLIT = re.compile(r"(?:^|[^a-z])(train|test|validation|valid|val|dev|eval)(?:[^a-z]|$)")
DELIMITERS = ",;\t"
LONGEST_CELL = 1 << 27
"""Characters; csv's default of 131072 is too short for some dialogues."""
NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as `surrogateescape` decodes them."""


def data_files(path: Path, note: Callable[[str], None]) -> list[Path]:
    """Files (or saved data sets) at `path`; of several splits only `train`, with a note."""
    if not path.exists():
        return [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if not path.is_dir() or any((path / name).is_file() for name in SAVED):
        return [path]
    found: list[Path] = []
    for folder in (path, path / "data"):
        if folder.is_dir() and not found:
            files = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in NOT_ROWS)
            found = [file for file in files if _bare_name(file).endswith(ENDINGS)]
    if not found:
        raise DataError(
            f"data.path={path} is a directory, but not a saved Hugging Face data set (it has no state.json or "
            f"dataset_dict.json), and no file in it ends with {', '.join(ENDINGS)} (nor such a name with {', '.join(PACKED)}). "
            "Name one written by `save_to_disk`, or the file with the rows."
        )
    splits: dict[str, list[Path]] = {}
    for file in found:
        named = SPLIT.search(file.name.lower())
        splits.setdefault(named[1] if named else "train", []).append(file)
    if len(splits) == 1:
        return found
    if "train" not in splits:
        raise DataError(f"data.path={path} has files of the splits {', '.join(splits)}; name those to read: {path}/test*")
    train = splits["train"]
    note(f"{path}: {len(train)} files of the split train are read, {len(found) - len(train)} of other splits are not")
    return train


def _bare_name(file: Path) -> str:
    name = file.name.lower()
    return name.rpartition(".")[0] if name.endswith(PACKED) else name


def file_rows(path: Path) -> Iterator[Numbered]:
    """Yield rows of a file or saved data set. Raises DataError if damaged or empty."""
    if path.is_dir():
        yield from _saved_rows(path)
        return
    try:
        with _opened(path) as stream:
            start = stream.read(PEEKED_BYTES)
        with _opened(path) as stream:
            lines = (line for line in stream if line.removeprefix(BOM).strip())
            first, second = next(lines, b""), next(lines, b"")
        with _opened(path) as stream:
            yield from _rows(stream, path, start, first, second)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: compressed, and damaged ({error}); fetch or write it again") from error


def _opened(path: Path) -> BinaryIO:
    if irregular := irregular_path("the file of rows", path):
        raise DataError(irregular)
    with path.open("rb") as raw:
        start = raw.read(8)
    for mark, unpack in UNPACKED.items():
        if start.startswith(mark):
            return cast(BinaryIO, unpack(path))
    return path.open("rb")


def _open_zstd(path: Path) -> BinaryIO:
    instead = f"unpack it (`zstd -d {path}`)"
    pyarrow = _require("pyarrow", f"{path} is compressed by zstd, and unpacking it", instead)
    return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))


UNPACKED: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ\0": lzma.open,
    b"BZh": bz2.open,
    b"\x28\xb5\x2f\xfd": _open_zstd,
}


def _require(package: str, what: str, instead: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise DataError(f"{what} needs the `{name}` package: `pip install {name}`, or {instead}") from error


def _rows(stream: BinaryIO, path: Path, start: bytes, first: bytes, second: bytes) -> Iterator[Numbered]:
    for mark, what in FOREIGN.items():
        if start.startswith(mark):
            raise DataError(f"{path} is {what}")
    if start[257:262] == b"ustar":
        raise DataError(f"{path} is a tar archive; unpack it (`tar -xf`), and name the file with the rows")
    if start.startswith(b"PAR1"):
        yield from _parquet_rows(stream if stream.seekable() else io.BytesIO(stream.read()), path)
    elif delimiter := _table_delimiter(first, _bare_name(path)):
        yield from _table_rows(stream, delimiter, path)
    elif spans_lines(first, second):
        content = stream.read()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            where = f"{path}:{line}: not UTF-8 (byte {error.start} of the file)"
            raise DataError(f"{where}; save the file as UTF-8") from error
        yield from json_values(text, str(path))
    else:
        yield from json_lines(stream)


def _table_delimiter(first: bytes, name: str) -> str | None:
    header = first.decode("utf-8-sig", errors="replace")
    if header.lstrip().startswith(("{", "[")) or "\0" in header or not header:
        return None
    if name.endswith(".tsv"):
        return "\t"
    delimiter = max(DELIMITERS, key=header.count)
    columns = {column.strip().strip('"') for column in header.split(delimiter)}
    known = len(columns) > 1 and any(columns & {*names} for names in KNOWN_NAMES.values())
    return delimiter if known or name.endswith(".csv") else None


def csv_rows(path: Path) -> Iterator[Numbered]:
    """Raises DataError."""
    with _opened(path) as stream:
        yield from _table_rows(stream, ",", path)


def _table_rows(stream: BinaryIO, delimiter: str, file: Path) -> Iterator[Numbered]:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    usual = csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    line = 1
    try:
        header = next(reader, [])
        if (twice := next((name for i, name in enumerate(header) if name in header[:i]), None)) is not None:
            raise DataError(f"{file}:1: the column name {twice!r:.60} comes twice in the header; rename one of them")
        if any(map(NOT_UTF8.search, header)):
            raise DataError(f"{file}:1: not UTF-8; save the file as UTF-8")
        line = reader.line_num + 1
        for cells in reader:
            if cells:
                yield line, _row_of_cells(header, cells, delimiter)
            line = reader.line_num + 1
    except csv.Error as error:
        remedy = "close its quotation marks, and write one within a cell twice"
        raise DataError(f"{file}:{line}: not CSV ({error}); {remedy}") from error
    finally:
        csv.field_size_limit(usual)


def _row_of_cells(header: list[str], cells: list[str], delimiter: str) -> dict[str, Any] | DataError:
    """The row, or why it is refused. Cells may hold messages in JSON."""
    if len(cells) != len(header):
        shown = "a tab" if delimiter == "\t" else repr(delimiter)
        return DataError(
            f"{len(cells)} cells, but the header has {len(header)} columns; put cells that hold {shown} or a line break into "
            "quotation marks"
        )
    row: dict[str, Any] = {}
    for name, cell in zip(header, cells, strict=True):
        if NOT_UTF8.search(cell):
            return DataError(f"column {name!r:.60} is not UTF-8; save the file as UTF-8")
        row[name] = cell
        if cell.lstrip().startswith("[") and "{" in cell:
            try:
                value = read_json(cell)
            except ValueError:
                continue
            if isinstance(value, list) and all(isinstance(item, dict) for item in value):
                row[name] = value
    try:
        check_value(row)
        check_texts(row)
    except DataError as refusal:
        return refusal
    return row


def _parquet_rows(stream: BinaryIO, file: Path) -> Iterator[Numbered]:
    what = f"{file} is a Parquet file, and reading one"
    pyarrow, parquet = (_require(name, what, "write the rows as JSONL or CSV") for name in ("pyarrow", "pyarrow.parquet"))
    number = 0
    try:
        for batch in parquet.ParquetFile(stream).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                twice = len(row) < batch.num_columns
                yield number, DataError("two columns have one name; rename one of them") if twice else plain_row(row)
    except (pyarrow.ArrowException, OSError) as error:
        said = str(error).splitlines()[0]
        if "ecrypt" in said:  # some columns are encrypted, and not the footer
            raise DataError(f"{file} is {FOREIGN[b'PARE']}") from error
        where = f"{file}: a Parquet file that cannot be read beyond row {number}"
        raise DataError(f"{where} ({said}); write or fetch it again") from error
    except (ValueError, OverflowError) as error:
        said = str(error).partition("\n")[0]
        raise DataError(f"{file}: a time after row {number} is none of Python's ({said}); write times as text") from error


def _saved_rows(path: Path) -> Iterator[Numbered]:
    what = f"data.path={path} is a Hugging Face data set, and reading one"
    datasets = _require("datasets", what, "write the rows as JSONL (`Dataset.to_json`)")
    try:
        loaded = datasets.load_from_disk(str(path))
        if isinstance(loaded, dict):
            if "train" not in loaded and len(loaded) != 1:
                raise DataError(f"it holds the splits {', '.join(loaded)}; name the directory of one, {path}/SPLIT")
            loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
        for number, row in enumerate(loaded, start=1):  # damage shows as the rows are read
            yield number, plain_row(dict(row))
    except DataError as error:
        raise DataError(f"data.path={path}: {error}") from error
    except Exception as error:
        raise DataError(f"data.path={path}: cannot be read ({error}); write it again with save_to_disk") from error
