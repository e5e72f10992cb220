from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from oppo_megatron.errors import DataError
from oppo_megatron.nesting import DEEPEST, check_value, read_json, read_strict_json, text_fault, too_deep_at
from oppo_megatron.records import TypedText

BOM, GZIP = b"\xef\xbb\xbf", b"\x1f\x8b"
SPACES = re.compile("[ \t\r\n\ufeff]*")

Numbered = tuple[int, "dict[str, Any] | DataError"]
"""Line (from 1; in Parquet the row) at which a row begins, and the row or the error that refuses it."""


def json_lines(stream: Iterable[bytes]) -> Iterator[Numbered]:
    """Yield a row per line, ignoring blank lines at the end."""
    blank: list[int] = []
    for line, raw in enumerate(stream, start=1):
        if not raw.strip():
            blank.append(line)
            continue
        yield from ((number, DataError("the line is blank")) for number in blank)
        blank.clear()
        yield line, _parsed(raw.removeprefix(BOM) if line == 1 else raw)


def spans_lines(first: bytes, second: bytes) -> bool:
    """True if the first two non-blank lines show an array, or multi-line objects."""
    first, second = first.removeprefix(BOM).strip(), second.strip()
    if first == b"[":
        return True
    if not first.startswith((b"[", b"{")) or _is_json(second, dict):
        return False
    if first.startswith(b"["):
        return not _is_json(first, list) or not second
    try:
        read_json(first.decode("utf-8", errors="replace"))
    except json.JSONDecodeError as error:
        return error.pos >= len(error.doc)  # the object has begun and does not end on this line
    except ValueError:
        pass
    return False


def _is_json(text: bytes, kind: type) -> bool:
    try:
        return isinstance(read_json(text), kind)
    except ValueError:
        return False


def json_values(text: str, file: str) -> Iterator[Numbered]:
    """Yield the objects of an array, or consecutive objects. Raises DataError."""

    def fault(place: int, reason: str) -> DataError:
        line = text.count("\n", 0, place) + 1
        return DataError(f"{file}:{line}: {reason}")

    decoder, place, line, counted = json.JSONDecoder(), _after_spaces(text, 0), 1, 0
    is_array = text.startswith("[", place)
    deep = too_deep_at(text, DEEPEST + is_array)
    text = text[:deep]  # reading stops there, as at the end of the text
    place = _after_spaces(text, place + is_array)
    while place < len(text) and not (is_array and text.startswith("]", place)):
        line, counted = line + text.count("\n", counted, place), place
        try:
            _, end = decoder.raw_decode(text, place)
        except ValueError as error:
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):
                what = f"nested deeper than {DEEPEST} there" if error.pos == deep else error.msg
                reason = f"{what} at line {error.lineno} column {error.colno}"
            what = "the array" if is_array else "the file, whose objects go over several lines,"
            remedy = "correct it, or write each object on a line of its own"
            raise fault(place, f"not JSON ({reason}); {what} cannot be read beyond this row: {remedy}") from error
        yield line, _parsed(text[place:end].encode())
        place = _after_spaces(text, end)
        if is_array and text.startswith(",", place):
            place = _after_spaces(text, place + 1)
        elif is_array and not text.startswith("]", place):
            raise fault(place, "the array has no comma or ] after an object; correct it, or write JSONL")
    if is_array and text[place + 1 :].strip():
        raise fault(place, "there is more after the array's ]; remove it, or write one object per line")


def _after_spaces(text: str, place: int) -> int:
    found = SPACES.match(text, place)
    return found.end() if found else place


def _parsed(raw: bytes) -> dict[str, Any] | DataError:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return DataError("not UTF-8 but UTF-16, by its byte order mark; save the file as UTF-8")
    if raw.startswith(GZIP):
        return DataError("compressed by gzip; unpack the file")
    if (place := raw.find(b"\0")) >= 0:
        return DataError(f"a NUL byte (byte {place} of the line); the file is binary, damaged, or UTF-16")
    if raw.startswith(BOM):
        return DataError("a byte order mark, which only the first line of a file may begin with; remove it")
    try:
        value = read_strict_json(raw.decode("utf-8"), parse_float=_finite)
        if not isinstance(value, dict):
            kind = type(value).__name__
            return DataError(f'a JSON {kind}, not an object; each row is written {{"column": value, ...}}')
        if b"\\u" in raw:  # only an escape can bring in non-text
            check_texts(value)
    except UnicodeDecodeError as error:
        return DataError(f"not UTF-8 (byte {error.start} of the line)")
    except json.JSONDecodeError as error:
        return DataError(f"not JSON ({error.msg} at column {error.colno})")
    except DataError as refusal:
        return refusal
    except ValueError as error:
        return DataError(f"not JSON ({error})")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def plain_row(row: dict[str, Any]) -> dict[str, Any] | DataError:
    """Convert a typed file's row to JSON types (NaN to null), or return the error."""
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
        if math.isnan(value):
            return None
        if math.isinf(value):
            raise DataError(f"column {column!r:.60} is infinite; correct it, or leave the column out")
        if isinstance(value, float):
            return value
        if value == value.to_integral_value():
            return int(value)
        return float(value) if Decimal(repr(float(value))) == value else str(value)  # all of its digits
    if isinstance(value, (date, time, UUID)):  # a datetime is a date
        return TypedText(value if isinstance(value, UUID) else value.isoformat())
    if isinstance(value, timedelta):
        return value.total_seconds()
    with suppress(UnicodeDecodeError, AttributeError):
        return value.decode("utf-8")
    what = f"{type(value).__name__} that is neither text nor a number"
    raise DataError(f"column {column!r:.60} has {what}; leave the column out")


def check_texts(row: dict[str, Any]) -> None:
    """Raise DataError for NUL or half a surrogate pair, which tokenizers do not accept."""
    for column, value in row.items():
        left = [column, value]
        while left:  # without recursion: nested values may be deep
            item = left.pop()
            if isinstance(item, dict):
                left += [*item, *item.values()]
            elif isinstance(item, (list, tuple)):
                left += item
            elif isinstance(item, str):
                if fault := text_fault(item):
                    raise DataError(f"column {column!r:.60} {fault}")
