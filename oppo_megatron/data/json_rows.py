"""Rows in JSON: an object per line, an array of objects, or objects over several lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from oppo_megatron.errors import DataError
from oppo_megatron.nesting import DEEPEST, check_value, read_json, too_deep_at

BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"
SPACES = " \t\r\n"

Numbered = tuple[int, "dict[str, Any] | DataError"]
"""The line, from 1, on which a row begins (in Parquet: the row), and the row, or the error that refuses it."""


def json_lines(stream: Iterable[bytes]) -> Iterator[Numbered]:
    """Yield a row per line; blank lines at the end of the file are ignored."""
    blank: list[int] = []
    for line, raw in enumerate(stream, start=1):
        if not raw.strip():
            blank.append(line)
            continue
        yield from ((number, DataError("the line is blank")) for number in blank)
        blank.clear()
        try:
            yield line, parse(raw.removeprefix(BOM) if line == 1 else raw)
        except DataError as refusal:
            yield line, refusal


def spans_lines(first: bytes, second: bytes) -> bool:
    """True if a file is an array or has objects over several lines, by its first two lines that are not blank."""
    first, second = first.removeprefix(BOM).strip(), second.strip()
    if first == b"[":
        return True
    if not first.startswith((b"[", b"{")) or _is_json(second, dict):
        return False
    if first.startswith(b"["):
        return not _is_json(first, list) or not second
    return _is_unfinished(first)


def _is_unfinished(text: bytes) -> bool:
    """True if a JSON value begins here and does not end on this line."""
    try:
        read_json(text.decode("utf-8", errors="replace"))
    except json.JSONDecodeError as error:
        return error.pos >= len(error.doc)
    except ValueError:
        return False
    return False


def json_values(text: str, file: str) -> Iterator[Numbered]:
    """Yield the objects of an array, or consecutive objects.  Raises DataError if the rest cannot be read."""
    decoder, place, line = json.JSONDecoder(), _skip(text, 0, SPACES + "\ufeff"), 1
    is_array, counted = text.startswith("[", place), 0
    deep = too_deep_at(text, DEEPEST + is_array)
    text = text[:deep]  # reading stops there, as at the end of the text
    place = _skip(text, place + 1, SPACES) if is_array else place
    while place < len(text) and not (is_array and text.startswith("]", place)):
        line, counted = line + text.count("\n", counted, place), place
        try:
            _, end = decoder.raw_decode(text, place)
        except ValueError as error:
            raise _beyond_reading(file, line, error, is_array, deep) from error
        try:
            yield line, parse(text[place:end].encode())
        except DataError as refusal:
            yield line, refusal
        place = _skip(text, end, SPACES)
        if is_array and text.startswith(",", place):
            place = _skip(text, place + 1, SPACES)
        elif is_array and not text.startswith("]", place):
            line += text.count("\n", counted, place)
            raise DataError(f"{file}:{line}: the array has no comma or ] after an object; correct it, or write JSONL")
    if is_array and text[place + 1 :].strip():
        line += text.count("\n", counted, place)
        raise DataError(f"{file}:{line}: there is more after the array's ]; remove it, or write an object a line")


def _beyond_reading(file: str, line: int, error: Exception, is_array: bool, deep: int | None) -> DataError:
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):
        reason = f"{error.msg} at line {error.lineno} column {error.colno}"
        reason = f"nested deeper than {DEEPEST} there" if error.pos == deep else reason
    what = "the array" if is_array else "the file, whose objects go over several lines,"
    return DataError(
        f"{file}:{line}: not JSON ({reason}); {what} cannot be read beyond this row: correct it, or write each object on "
        "a line of its own"
    )


def _is_json(text: bytes, kind: type) -> bool:
    try:
        return isinstance(read_json(text), kind)
    except ValueError:
        return False


def _skip(text: str, place: int, characters: str) -> int:
    while place < len(text) and text[place] in characters:
        place += 1
    return place


def parse(raw: bytes) -> dict[str, Any]:
    """The object written in `raw`.  Raises DataError."""
    _check_bytes(raw)
    try:
        value = read_json(
            raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_distinct
        )
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON ({error.msg} at column {error.colno})") from error
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f'a JSON {type(value).__name__}, not an object; each row is written {{"column": value, ...}}')
    if b"\\u" in raw:  # only an escape can bring in non-text
        check_texts(value)
    return value


def _check_bytes(raw: bytes) -> None:
    """Raise a DataError that names what a JSON reader would call an unexpected character."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError("not UTF-8 but UTF-16, by its byte order mark; save the file as UTF-8")
    if raw.startswith(GZIP):
        raise DataError("compressed by gzip; unpack the file")
    if (place := raw.find(b"\0")) >= 0:
        raise DataError(f"a NUL byte (byte {place} of the line); the file is binary, damaged, or UTF-16")
    if raw.startswith(BOM):
        raise DataError("a byte order mark, which only the first line of a file may begin with; remove it")


def plain_row(row: dict[str, Any]) -> dict[str, Any] | DataError:
    """Convert a row of a typed file to JSON's types, which rewards, services and records need; NaN becomes null.

    Returns the error if a value cannot be converted.
    """
    try:
        check_value(row)
        row = {column: _plain(value, column) for column, value in row.items()}
        check_texts(row)
    except DataError as refusal:
        return refusal
    return row


def _plain(value: Any, column: str) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, dict):
        return {str(name): _plain(part, column) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part, column) for part in value]
    if isinstance(value, (float, Decimal)):
        return _plain_number(value, column)
    if isinstance(value, (date, time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    with suppress(UnicodeDecodeError, AttributeError):
        return value.decode("utf-8")
    what = f"{type(value).__name__} that is neither text nor a number"
    raise DataError(f"column {column!r:.60} has {what}; leave the column out")


def _plain_number(value: float | Decimal, column: str) -> float | int | str | None:
    """Return a number of the same value, or text if no number has all of its digits."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        raise DataError(f"column {column!r:.60} is infinite; correct it, or leave the column out")
    if isinstance(value, float):
        return value
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def check_texts(row: dict[str, Any]) -> None:
    """Raise DataError for a column with NUL or half of a surrogate pair, which tokenizers do not accept."""
    for column, value in row.items():
        for text in _texts([column, value]):
            if (place := text.find("\0")) >= 0:
                raise DataError(f"column {column!r:.60} has a NUL at character {place}")
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise DataError(
                    f"column {column!r:.60} is not text: half of a surrogate pair at character {error.start}"
                ) from error


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, including names, without recursion."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            left += [*item, *item.values()]
        elif isinstance(item, (list, tuple)):
            left += item


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, refusing a name that comes twice: JSON does not say which value is meant."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if any(name == other for other, _ in pairs[:i]))
        raise ValueError(f"the name {twice!r:.60} comes twice in one object")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
