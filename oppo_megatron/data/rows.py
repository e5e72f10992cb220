"""Rows of a data set in any file format, each with its file and line.

A refused row is never dropped silently.  Under policy `error` all refused rows are gathered into one `DataError`; under
`quarantine` they are set aside with file, line and reason.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oppo_megatron.config.data import RowsConfig
from oppo_megatron.data.files import data_files, file_rows
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.preflight.settings import check_data
from oppo_megatron.records import field_at

Policy = Literal["error", "quarantine"]
NUM_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its position in the data set (refused rows counted, from 0), its place, and its columns."""

    index: int
    file: str
    line: int
    values: dict[str, Any]

    def get(self, column: str | None) -> Any:
        """Return the value in a column, or under a dotted name; None if the row has none."""
        try:
            return None if column is None else field_at(self.values, column)
        except KeyError:
            return None

    def require(self, column: str) -> Any:
        """Return the value in a column, or under a dotted name.  Raises DataError if the row has none."""
        try:
            return field_at(self.values, column)
        except KeyError:
            there = ", ".join(self.values) or "none"
            raise DataError(f"column {column!r} is missing (the row has: {there})") from None


@dataclass(slots=True)
class Quarantine:
    """The outcome of reading data sets.

    `entries`: refused rows that were set aside, each with `file`, `line` and `reason`.  `notes`: lines about how a data set was
    understood.  `first`: the first row of the first data set as the model sees it, by part (prompt, completion, ...).
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first: dict[str, str] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda line: None
    """Called with a line for every row."""

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, file: str, line: int, reason: str) -> None:
        """Set one row aside."""
        self.entries.append({"file": file, "line": line, "reason": reason})

    def note(self, line: str) -> None:
        """Add a note, once."""
        if line not in self.notes:
            self.notes.append(line)

    def write(self, path: Path) -> None:
        """Write the entries as JSONL, replacing the file as a whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries), encoding="utf-8")
        os.replace(partial, path)


class RowProblems:
    """The refused rows of one data set, each handled by the policy of its setting.

    `configured` is false if there is no configuration, hence no setting that would set rows aside.
    """

    def __init__(self, quarantine: Quarantine, configured: bool = True):
        self.quarantine = quarantine
        self._configured = configured
        self.num_errors = self._num_sound = 0
        self.num_quarantined = 0
        self._shown: dict[tuple[str, int], str] = {}
        self._same: dict[str, tuple[str, int]] = {}
        self._more: Counter[tuple[str, int]] = Counter()
        self._last: dict[tuple[str, int], str] = {}
        self._settings: list[str] = []

    def report(
        self,
        file: str,
        line: int,
        reason: str,
        policy: Policy,
        setting: str = "data.bad_rows",
        *,
        once: bool | str = False,
        sound: bool = False,
    ) -> None:
        """Record one refused row; `setting` is the one that would set such rows aside.

        `once`: rows with the same reason, or with this text in common, are shown as one with their number.  `sound`: the row is
        valid, and another chat template would render it.
        """
        common = once if isinstance(once, str) else reason
        if policy == "quarantine":
            self.num_quarantined += 1
            self.quarantine.add(file, line, reason)
            return
        self.num_errors += 1
        self._num_sound += sound
        if once and common in self._same:
            self._more[self._same[common]] += 1
            self._last[self._same[common]] = f"{file}:{line}"
        elif len(self._shown) < NUM_SHOWN:
            self._shown[file, line] = reason
            self._same[common] = file, line
        if setting not in self._settings:
            self._settings.append(setting)

    def raise_errors(self, *, any_left: bool = True) -> None:
        """Raise one `DataError` for all rows refused under policy `error`, if any.

        Without `any_left`, setting them aside would leave no row and is not suggested.
        """
        if not self.num_errors:
            return
        rows = "1 row" if self.num_errors == 1 else f"{self.num_errors} rows"
        num_told = len(self._shown) + self._more.total()
        shown = "" if self.num_errors == num_told else f", the first {NUM_SHOWN} are shown"
        remedy = " and ".join(f"{setting}=quarantine" for setting in self._settings)
        correct = "Correct them"
        if self._num_sound:
            correct = "Set tokenizer.chat_template to a template that renders answers whole"
            correct += ": the rows are sound" if self._num_sound == self.num_errors else ", and correct the other rows"
        raise DataError(
            f"{rows} cannot be used{shown}:\n"
            + "\n".join(self._line(place, reason) for place, reason in self._shown.items())
            + (
                f"\n{correct}, or set {remedy} to continue without such rows."
                if self._configured and any_left
                else f"\n{correct}."
            )
        )

    def _line(self, place: tuple[str, int], reason: str) -> str:
        line, more = f"  {place[0]}:{place[1]}: {reason}", self._more[place]
        if not more:
            return line
        return f"{line} [and {more} more {'row' if more == 1 else 'rows'}, the last {self._last[place]}]"


def read_rows(config: RowsConfig, problems: RowProblems, templates: Sequence[str] = ()) -> list[Row]:
    """Read the rows of `config.path` in order, at most `config.max_rows` with refused ones.

    `templates` names the templates that the rows will need (`prompt`, `completion`).  Raises `ConfigError` if a path or
    template is wrong, `DataError` without any row; rows that are not JSON objects go to `problems`.
    """
    wrong = check_data("data", config, templates)
    if wrong:
        raise ConfigError(wrong)
    paths = config.path if isinstance(config.path, list) else [config.path]
    rows: list[Row] = []
    num_seen = 0
    files = [file for path in paths for file in data_files(path, problems.quarantine.note)]
    for path in files:
        for line, content in file_rows(path):
            problems.quarantine.progress(f"reading {path}: {num_seen} rows")
            if config.max_rows is not None and num_seen == config.max_rows:
                break
            if isinstance(content, DataError):
                problems.report(str(path), line, str(content), config.bad_rows)
            else:
                rows.append(Row(num_seen, str(path), line, content))
            num_seen += 1
    if not rows:
        problems.raise_errors(any_left=False)
        raise DataError(_nothing_left(paths, problems, num_seen))
    return rows


def require_some(usable: int, config: RowsConfig, problems: RowProblems) -> None:
    """Raise the gathered errors, or a `DataError` if every row was set aside."""
    problems.raise_errors(any_left=usable > 0)
    if not usable:
        paths = config.path if isinstance(config.path, list) else [config.path]
        raise DataError(_nothing_left(paths, problems, problems.num_quarantined))


def _nothing_left(paths: list[Path], problems: RowProblems, num_seen: int) -> str:
    names = ", ".join(str(path) for path in paths)
    if num_seen == 0:
        return f"data.path={names} holds no row; at least one is needed: name a file with rows in it (docs/data.md)."
    first = problems.quarantine.entries[-problems.num_quarantined]
    return (
        f"data.path={names}: all {num_seen} rows were set aside, none is left; the first "
        f"({first['file']}:{first['line']}) because: {first['reason']}. Correct the "
        "file, or the settings that the reasons name."
    )
