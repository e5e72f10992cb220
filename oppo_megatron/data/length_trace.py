"""Lengths of recorded requests, from CSV, for benchmarks whose responses are to end as real ones do.

Two kinds of file, told apart by the header:

- one row a request, with a column of tokens (`GeneratedTokens`, as in Azure's LLM inference traces);
- a histogram `kind,tokens,requests`: so many requests of a kind (`output`, `input`) had so many tokens.

A file is read once from front to end; only how many requests had which length is kept.
"""

from __future__ import annotations

import csv
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from oppo_megatron.config.debug import ForcedLengths
from oppo_megatron.data.rows import Quarantine, RowProblems
from oppo_megatron.errors import DataError

COLUMN, KIND = "GeneratedTokens", "output"
HISTOGRAM = ("kind", "tokens", "requests")
SETTING = "debug.forced_lengths"
WHOLE_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class LengthTrace:
    """An empirical distribution: lengths in tokens, ascending, and how many requests had at most each of them."""

    tokens: tuple[int, ...]
    requests: tuple[int, ...]

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> LengthTrace:
        """Built from the number of requests of each length; at least one request is needed."""
        lengths = sorted(length for length, requests in counts.items() if requests)
        assert lengths, "a distribution of no request"
        return cls(tuple(lengths), tuple(accumulate(counts[length] for length in lengths)))

    def quantile(self, u: float) -> int:
        """Inverse of the distribution function: the smallest length that a share of at least `u` does not exceed."""
        return self.tokens[bisect_left(self.requests, u * self.requests[-1])]

    @property
    def percentile_99(self) -> int:
        """`quantile(0.99)`, in whole numbers: no rounding decides between two lengths."""
        return self.tokens[bisect_left(self.requests, -(-99 * self.requests[-1] // 100))]


def forced_quantile(forced: ForcedLengths | None, max_response_tokens: int) -> Callable[[float], float] | None:
    """Quantile function of the response lengths that `debug.forced_lengths` asks for; None without a trace.

    With `scale: auto` the trace's 99th percentile becomes `rollout.max_response_tokens`.  Raises DataError.
    """
    if forced is None or forced.trace is None:
        return None
    trace = read_length_trace(forced.trace, forced.column)
    if forced.scale != "auto":
        factor = forced.scale
    elif trace.percentile_99:
        factor = max_response_tokens / trace.percentile_99
    else:
        raise DataError(
            f"{forced.trace}: the 99th percentile of its lengths is 0 tokens, which no scale makes "
            f"rollout.max_response_tokens; name another column, as in debug.forced_lengths: [{forced.trace}, COLUMN]"
        )
    return lambda u: factor * trace.quantile(u)


def trace_problems(forced: ForcedLengths | None, max_response_tokens: int) -> list[str]:
    """The faults of the file that `debug.forced_lengths` names, if it names one."""
    if forced is None or forced.trace is None or not forced.trace.exists():
        return []  # a missing file is reported by the cross-checks
    try:
        forced_quantile(forced, max_response_tokens)
    except DataError as error:
        return [f"{SETTING}: {error}"]
    return []


def read_length_trace(path: Path, column: str | None = None) -> LengthTrace:
    """The distribution in a file.  `column` is the column of tokens, or the kind of a histogram; None: the usual one.

    Raises DataError, naming file and line: no such file, no header, no such column or kind, a value that is no whole
    number of at least 0, no request.  Blank lines are no rows.
    """
    lines = _lines(path)
    line, names = next(lines, (1, []))
    row = _new_row(f"{path}, line {line}", [name.strip() for name in names], column)
    counts: Counter[int] = Counter()
    problems = RowProblems(Quarantine(), configured=False)
    for line, cells in lines:
        try:
            tokens, requests = row.read(cells)
        except DataError as refusal:
            problems.report(str(path), line, str(refusal), "error")
        else:
            counts[tokens] += requests
    problems.raise_errors()
    if not counts.total():
        raise DataError(f"{path}: {row.nothing_found}")
    return LengthTrace.of(counts)


class _Row(Protocol):
    """How a row of a file is read."""

    def read(self, cells: Sequence[str]) -> tuple[int, int]:
        """(tokens, requests) of the row.  Raises DataError."""

    @property
    def nothing_found(self) -> str:
        """The fault of a file without any request."""


@dataclass(frozen=True)
class _Request:
    column: str
    place: int

    def read(self, cells: Sequence[str]) -> tuple[int, int]:
        return _whole_number(self.column, cells, self.place), 1

    @property
    def nothing_found(self) -> str:
        return "no row follows the header, but at least one request is needed; add rows, or name another file"


@dataclass(frozen=True)
class _Histogram:
    kind: str
    places: tuple[int, int, int]  # of HISTOGRAM
    kinds: set[str] = field(default_factory=set)

    def read(self, cells: Sequence[str]) -> tuple[int, int]:
        kind, tokens, requests = self.places
        name = cells[kind].strip() if kind < len(cells) else ""
        self.kinds.add(name)
        if name != self.kind:
            return 0, 0
        return _whole_number("tokens", cells, tokens), _whole_number("requests", cells, requests)

    @property
    def nothing_found(self) -> str:
        return (
            f"a histogram with 0 requests of kind `{self.kind}`, but at least one is needed; its kinds are "
            f"{', '.join(sorted(self.kinds)) or 'none'}: name another, as in debug.forced_lengths: [FILE, KIND], or another file"
        )


def _new_row(where: str, header: Sequence[str], column: str | None) -> _Row:
    """By the header, which stands at `where`."""
    if set(HISTOGRAM) <= set(header):
        kind, tokens, requests = (_place(where, header, name) for name in HISTOGRAM)
        return _Histogram(column or KIND, (kind, tokens, requests))
    return _Request(column or COLUMN, _place(where, header, column or COLUMN))


def _place(where: str, header: Sequence[str], name: str) -> int:
    """Position of a column."""
    if header.count(name) == 1:
        return header.index(name)
    found = ", ".join(header) or "none"
    if name in header:
        raise DataError(f"{where}: the column `{name}` must stand once in the header ({found}); rename one")
    raise DataError(
        f"{where}: there must be a column `{name}`, but the columns are: {found}; name the one that holds "
        f"tokens, as in debug.forced_lengths: [FILE, COLUMN], or give a histogram {','.join(HISTOGRAM)}"
    )


def _whole_number(column: str, cells: Sequence[str], place: int) -> int:
    text = cells[place].strip() if place < len(cells) else ""
    if not WHOLE_NUMBER.fullmatch(text):
        raise DataError(f"`{column}` is {text!r}, but must be a whole number of at least 0, of at most 15 digits")
    return int(text)


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line from 1, cells) of the lines that are not blank.  Raises DataError for a file that is no CSV text."""
    if not path.is_file():
        raise DataError(f"{path} is no file; {SETTING} must be a CSV file: correct the path")
    with path.open("rb") as stream:
        reader = csv.reader(_decoded(path, stream))
        try:
            for cells in reader:
                if cells:
                    yield reader.line_num, cells
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not CSV ({error}); correct the line") from error


def _decoded(path: Path, raw_lines: Iterator[bytes]) -> Iterator[str]:
    for number, raw in enumerate(raw_lines, start=1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, line {number}: not UTF-8 (byte {error.start} of the line); save the file as UTF-8 text"
            ) from error
