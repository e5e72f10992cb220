"""Rows of tables: CSV, tab-separated text, Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any, BinaryIO

from oppo_megatron.data.json_rows import Numbered, check_texts, plain_row
from oppo_megatron.errors import DataError
from oppo_megatron.nesting import check_value, read_json

DELIMITERS = ",;\t"
LONGEST_CELL = 1 << 27
"""Characters; csv's default limit of 131072 is too short for some dialogues."""
PYARROW = "pip install pyarrow"


def delimiter_of(header: str) -> str:
    """The separator of a header line: the most frequent of comma, semicolon and tab; comma without any."""
    return max(DELIMITERS, key=header.count)


def csv_rows(stream: BinaryIO, delimiter: str, file: str) -> Iterator[Numbered]:
    """Yield the rows below a line of column names, numbered by the line on which they begin.

    A cell that is a JSON list of objects is read as messages.  Raises DataError for a wrong header.
    """
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    usual = csv.field_size_limit(LONGEST_CELL)
    try:
        yield from _below_header(csv.reader(text, delimiter=delimiter, strict=True), delimiter, file)
    finally:
        csv.field_size_limit(usual)


def _below_header(reader: Any, delimiter: str, file: str) -> Iterator[Numbered]:
    header: list[str] = next(reader, [])
    _check_header(header, file)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{file}:{line}: not CSV ({error}); close its quotation marks, and write one within a cell twice"
            ) from error
        if cells is None:
            return
        try:
            if cells:
                yield line, _cells_as_row(header, cells, delimiter)
        except DataError as refusal:
            yield line, refusal


def _check_header(header: list[str], file: str) -> None:
    twice = next((name for i, name in enumerate(header) if name in header[:i]), None)
    if twice is not None:
        raise DataError(f"{file}:1: the column name {twice!r:.60} comes twice in the header; rename one of them")
    if any("\udc80" <= character <= "\udcff" for name in header for character in name):
        raise DataError(f"{file}:1: not UTF-8; save the file as UTF-8")


def _cells_as_row(header: list[str], cells: list[str], delimiter: str) -> dict[str, Any]:
    if len(cells) != len(header):
        shown = "a tab" if delimiter == "\t" else repr(delimiter)
        raise DataError(
            f"{len(cells)} cells, but the header has {len(header)} columns; put cells that hold {shown} or a line break into "
            "quotation marks"
        )
    for name, cell in zip(header, cells, strict=True):
        if any("\udc80" <= character <= "\udcff" for character in cell):
            raise DataError(f"column {name!r:.60} is not UTF-8; save the file as UTF-8")
    row = {name: _messages(cell) for name, cell in zip(header, cells, strict=True)}
    check_value(row)
    check_texts(row)
    return row


def _messages(cell: str) -> Any:
    """The messages of a cell that is a JSON list of objects; other cells are unchanged."""
    if not cell.lstrip().startswith("[") or "{" not in cell:
        return cell
    try:
        value = read_json(cell)
    except ValueError:
        return cell
    return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else cell


def parquet_rows(stream: BinaryIO, file: str) -> Iterator[Numbered]:
    """Yield the rows of a Parquet file, numbered from 1, in batches.  Raises DataError without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{file} is a Parquet file, and reading one needs the `pyarrow` package: `{PYARROW}`, or write the rows as "
            "JSONL or CSV"
        ) from error
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, plain_row(row)
    except (pyarrow.ArrowException, OSError) as error:
        first_line = str(error).splitlines()[0]
        raise DataError(
            f"{file}: a Parquet file that cannot be read beyond row {number} ({first_line}); write or fetch it again"
        ) from error
