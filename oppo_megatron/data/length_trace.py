"""Recorded response lengths for `rollout.forced_lengths`: a row per request, or a histogram of `kind`, `tokens`, `requests`."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from oppo_megatron.config.ppo import ForcedLengths
from oppo_megatron.data.files import csv_rows
from oppo_megatron.data.rows import Quarantine, RowProblems
from oppo_megatron.errors import DataError

COLUMN, KIND = "GeneratedTokens", "output"
HISTOGRAM = ("kind", "tokens", "requests")
SETTING = "rollout.forced_lengths"
WHOLE_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class LengthTrace:
    """Ascending lengths in tokens, and the cumulative number of requests."""

    tokens: tuple[int, ...]
    requests: tuple[int, ...]

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> LengthTrace:
        lengths = sorted(length for length, requests in counts.items() if requests)
        assert lengths, "a distribution of no request"
        return cls(tuple(lengths), tuple(accumulate(counts[length] for length in lengths)))

    def quantile(self, u: float) -> int:
        """Smallest length that a share `u` of requests does not exceed."""
        return self.tokens[bisect_left(self.requests, u * self.requests[-1])]

    @property
    def percentile_99(self) -> int:
        return self.tokens[bisect_left(self.requests, -(-99 * self.requests[-1] // 100))]


def forced_quantile(forced: ForcedLengths | None, max_response_tokens: int) -> Callable[[float], float] | None:
    """None without a trace; `scale: auto` maps the 99th percentile to the limit. Raises DataError."""
    if forced is None or forced.trace is None:
        return None
    trace = read_length_trace(forced.trace, forced.column)
    if forced.scale == "auto" and not trace.percentile_99:
        raise DataError(
            f"{forced.trace}: the 99th percentile of its lengths is 0 tokens, which no scale makes "
            f"rollout.max_response_tokens; name another column, as in rollout.forced_lengths: [{forced.trace}, COLUMN]"
        )
    factor = max_response_tokens / trace.percentile_99 if forced.scale == "auto" else forced.scale
    return lambda u: factor * trace.quantile(u)


def trace_problems(forced: ForcedLengths | None, max_response_tokens: int) -> list[str]:
    if forced is None or forced.trace is None or not forced.trace.exists():
        return []
    try:
        forced_quantile(forced, max_response_tokens)
    except DataError as error:
        return [f"{SETTING}: {error}"]
    return []


def read_length_trace(path: Path, column: str | None = None) -> LengthTrace:
    """`column`: tokens or histogram kind. Raises DataError with file and line."""
    if not path.is_file():
        raise DataError(f"{path} is not a file; {SETTING} must be a CSV file: correct the path")
    counts: Counter[int] = Counter()
    kinds: set[str] = set()
    problems = RowProblems(Quarantine(), configured=False)
    for line, row in csv_rows(path):
        if isinstance(row, DataError):
            problems.report(str(path), line, str(row), "error")
            continue
        cells = {name.strip(): str(cell).strip() for name, cell in row.items()}
        is_histogram = set(HISTOGRAM) <= cells.keys()
        if not is_histogram and (column or COLUMN) not in cells:
            raise DataError(
                f"{path}: there must be a column `{column or COLUMN}`, but the columns are: {', '.join(cells)}; name the one "
                f"that holds tokens, as in {SETTING}: [FILE, COLUMN], or give a histogram {','.join(HISTOGRAM)}"
            )
        try:
            if not is_histogram:
                counts[_whole_number(cells, column or COLUMN)] += 1
                continue
            kinds.add(cells["kind"])
            if cells["kind"] == (column or KIND):
                counts[_whole_number(cells, "tokens")] += _whole_number(cells, "requests")
        except DataError as refusal:
            problems.report(str(path), line, str(refusal), "error")
    problems.raise_errors()
    if counts.total():
        return LengthTrace.of(counts)
    if kinds:
        raise DataError(
            f"{path}: a histogram with 0 requests of kind `{column or KIND}`, but at least one is needed; its kinds are "
            f"{', '.join(sorted(kinds))}: name another, as in {SETTING}: [FILE, KIND], or another file"
        )
    raise DataError(f"{path}: no row follows the header, but at least one request is needed; add rows, or name another file")


def _whole_number(cells: Mapping[str, str], column: str) -> int:
    text = cells[column]
    if not WHOLE_NUMBER.fullmatch(text):
        raise DataError(f"`{column}` is {text!r}, but must be a whole number of at least 0, of at most 15 digits")
    return int(text)
