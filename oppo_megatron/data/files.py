"""The files that `data.path` names, and their rows, in any supported format.

A file's first bytes decide its type; its name decides only whether other text is CSV.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from oppo_megatron.config.paths import irregular_path
from oppo_megatron.data.json_rows import BOM, Numbered, json_lines, json_values, plain_row, spans_lines
from oppo_megatron.data.tables import PYARROW, csv_rows, delimiter_of, parquet_rows
from oppo_megatron.errors import DataError

ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")
PACKED = (".gz", ".xz", ".bz2", ".zst")
NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
SAVED = ("state.json", "dataset_dict.json")
PEEKED_BYTES = 1 << 9
FOREIGN: dict[bytes, str] = {
    b"version https://git-lfs": "a pointer of Git LFS and not the file itself; fetch it with `git lfs pull`",
    b"<!DOCTYPE": "a web page; fetch the file itself (the link to the raw file), not the page that shows it",
    b"<!doctype": "a web page; fetch the file itself (the link to the raw file), not the page that shows it",
    b"<html": "a web page; fetch the file itself (the link to the raw file), not the page that shows it",
    b"PK\x03\x04": "a zip archive (or a spreadsheet, which is one); unpack it, or save the sheet as CSV",
    b"ARROW1": "an Arrow file; name the folder that `save_to_disk` wrote, or write Parquet (`Dataset.to_parquet`)",
    b"\xff\xff\xff\xff": "an Arrow stream; name the folder that `save_to_disk` wrote, which holds state.json",
    b"\x80\x04": "a Python pickle, which is not read because it may run code; write the rows as JSONL",
    b"\x80\x05": "a Python pickle, which is not read because it may run code; write the rows as JSONL",
    b"SQLite format 3": "an SQLite database; export the table as CSV",
}
SPLIT = re.compile(r"(?:^|[^a-z])(train|test|validation|valid|val|dev|eval)(?:[^a-z]|$)")


def data_files(path: Path, note: Callable[[str], None]) -> list[Path]:
    """The files, or folder of `save_to_disk`, that `path` names: itself, what a pattern matches, or a folder's files.

    If the names in a folder show several splits, only the files of `train` are read, which is noted.
    """
    if not path.exists():
        return [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if not path.is_dir() or is_saved(path):
        return [path]
    found = next((files for folder in (path, path / "data") if (files := _rows_in(folder))), [])
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
        raise DataError(
            f"data.path={path} has files of the splits {', '.join(splits)}; name those to read: {path}/test*"
        )
    left = sum(len(files) for split, files in splits.items() if split != "train")
    note(f"{path}: {len(splits['train'])} files of the split train are read, {left} of other splits are not")
    return splits["train"]


def is_saved(folder: Path) -> bool:
    """True if `datasets.Dataset.save_to_disk` wrote this folder."""
    return any((folder / name).is_file() for name in SAVED)


def _rows_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in NOT_ROWS)
    return [file for file in files if _bare_name(file).endswith(ENDINGS)]


def _bare_name(file: Path) -> str:
    """The name in lower case, without the ending of a compression."""
    name = file.name.lower()
    return name.rpartition(".")[0] if name.endswith(PACKED) else name


def file_rows(path: Path) -> Iterator[Numbered]:
    """Yield the rows of a file or a saved data set.  Raises DataError if it does not hold rows or is damaged."""
    if path.is_dir():
        yield from _saved_rows(path)
        return
    try:
        with _opened(path) as stream:
            start, first, second = stream.read(PEEKED_BYTES), *_first_lines(path)
        with _opened(path) as stream:
            yield from _rows(stream, path, start, first, second)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path}: compressed, and damaged ({error}); fetch or write it again") from error


def _opened(path: Path) -> BinaryIO:
    """Open the file, decompressed according to its first bytes."""
    if irregular := irregular_path("the file of rows", path):
        raise DataError(irregular)
    with path.open("rb") as raw:
        start = raw.read(8)
    if start.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.open(path))
    if start.startswith(b"\xfd7zXZ\0"):
        return cast(BinaryIO, lzma.open(path))
    if start.startswith(b"BZh"):
        return cast(BinaryIO, bz2.open(path))
    if not start.startswith(b"\x28\xb5\x2f\xfd"):
        return path.open("rb")
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{path} is compressed by zstd, and unpacking it needs the `pyarrow` package: `{PYARROW}`, or unpack it "
            f"(`zstd -d {path}`)"
        ) from error
    return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))


def _first_lines(path: Path) -> tuple[bytes, bytes]:
    """The first two lines that are not blank; empty if there are fewer."""
    with _opened(path) as stream:
        lines = (line for line in stream if line.removeprefix(BOM).strip())
        return next(lines, b""), next(lines, b"")


def _rows(stream: BinaryIO, path: Path, start: bytes, first: bytes, second: bytes) -> Iterator[Numbered]:
    for mark, what in FOREIGN.items():
        if start.startswith(mark):
            raise DataError(f"{path} is {what}")
    if start[257:262] == b"ustar":
        raise DataError(f"{path} is a tar archive; unpack it (`tar -xf`), and name the file with the rows")
    if start.startswith(b"PAR1"):
        yield from parquet_rows(stream if stream.seekable() else io.BytesIO(stream.read()), str(path))
    elif delimiter := _table_delimiter(first, _bare_name(path)):
        yield from csv_rows(stream, delimiter, str(path))
    elif spans_lines(first, second):
        yield from json_values(_text(stream.read(), path), str(path))
    else:
        yield from json_lines(stream)


def _table_delimiter(first: bytes, name: str) -> str | None:
    """The separator of columns if the file is a table, by its name or by known column names in its first line."""
    from oppo_megatron.config.data import KNOWN_NAMES

    header = first.decode("utf-8-sig", errors="replace")
    if header.lstrip().startswith(("{", "[")) or "\0" in header or not header:
        return None
    if name.endswith(".tsv"):
        return "\t"
    delimiter = delimiter_of(header)
    if name.endswith(".csv"):
        return delimiter
    known = {known for names in KNOWN_NAMES.values() for known in names}
    columns = [column.strip().strip('"') for column in header.split(delimiter)]
    return delimiter if len(columns) > 1 and known.intersection(columns) else None


def _text(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 (byte {error.start} of the file); save the file as UTF-8") from error


def _saved_rows(path: Path) -> Iterator[Numbered]:
    """Rows of a folder written by `datasets.Dataset.save_to_disk`, numbered from 1."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"data.path={path} is a Hugging Face data set, and reading one needs the `datasets` package: "
            "`pip install datasets`, or write the rows as JSONL (`Dataset.to_json`)."
        ) from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"data.path={path}: cannot be opened ({error}); write it again with save_to_disk.") from error
    if isinstance(loaded, dict):
        if "train" not in loaded and len(loaded) != 1:
            raise DataError(
                f"data.path={path} holds the splits {', '.join(loaded)}; name the directory of one, {path}/SPLIT."
            )
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    for line, row in enumerate(_readable(path, loaded), start=1):
        yield line, plain_row(row)


def _readable(path: Path, loaded: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows.  Raises DataError if the files are damaged, which shows as they are read."""
    rows = iter(loaded)
    while True:
        try:
            row = next(rows, None)
        except Exception as error:
            raise DataError(f"data.path={path}: cannot be read ({error}); write it again with save_to_disk.") from error
        if row is None:
            return
        yield dict(row)
