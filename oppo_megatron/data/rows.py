from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oppo_megatron.config.data import RowsConfig
from oppo_megatron.data.files import data_files, file_rows
from oppo_megatron.errors import ConfigError, DataError
from oppo_megatron.preflight.validate import check_data
from oppo_megatron.records import Source, field_at

Policy = Literal["error", "quarantine"]
NUM_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Row:
    """Index (from 0, refused rows counted), place, columns and entry of `data.path` of a row."""

    index: int
    file: str
    line: int
    values: dict[str, Any]
    source: Source = Source()

    def get(self, column: str | None) -> Any:
        try:
            return None if column is None else field_at(self.values, column)
        except KeyError:
            return None

    def require(self, column: str) -> Any:
        try:
            return field_at(self.values, column)
        except KeyError:
            there = ", ".join(self.values) or "none"
            raise DataError(f"column {column!r} is missing (the row has: {there})") from None


@dataclass(slots=True)
class Quarantine:
    """Rows set aside, notes on reading, the first row as the model sees it; `progress` gets a line per row."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first: dict[str, str] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda line: None

    def __len__(self) -> int:
        return len(self.entries)

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries), encoding="utf-8")
        os.replace(partial, path)


@dataclass(slots=True)
class _Refused:
    """A refused row, and `more` with the same reason, up to `last`."""

    place: str
    reason: str
    more: int = 0
    last: str = ""

    def __str__(self) -> str:
        more = f" [and {self.more} more {'row' if self.more == 1 else 'rows'}, the last {self.last}]" if self.more else ""
        return f"  {self.place}: {self.reason}{more}"


class RowProblems:
    """`configured`: a setting can set refused rows aside."""

    def __init__(self, quarantine: Quarantine, configured: bool = True):
        self.quarantine = quarantine
        self._configured = configured
        self.num_errors = self._num_sound = self.num_quarantined = 0
        self._shown: list[_Refused] = []
        self._same: dict[str, _Refused] = {}
        self._settings: list[str] = []

    def report(
        self, file: str, line: int, reason: str, policy: Policy, setting: str = "data.bad_rows", *, once: bool | str = False,
        sound: bool = False,
    ) -> None:  # fmt: skip
        """`once`: show rows with the same reason, or this text, once. `sound`: another chat template would render the row."""
        if policy == "quarantine":
            self.num_quarantined += 1
            self.quarantine.entries.append({"file": file, "line": line, "reason": reason})
            return
        self.num_errors += 1
        self._num_sound += sound
        place, common = f"{file}:{line}", once if isinstance(once, str) else reason
        if once and (same := self._same.get(common)):
            same.more, same.last = same.more + 1, place
        elif len(self._shown) < NUM_SHOWN:
            self._same[common] = _Refused(place, reason)
            self._shown.append(self._same[common])
        if setting not in self._settings:
            self._settings.append(setting)

    def raise_errors(self, *, any_left: bool = True) -> None:
        """Raise one `DataError` for all rows refused under `error`. `any_left`: other rows remain."""
        if not self.num_errors:
            return
        rows = "1 row" if self.num_errors == 1 else f"{self.num_errors} rows"
        num_named = sum(1 + refused.more for refused in self._shown)
        shown = "" if self.num_errors == num_named else f", the first {NUM_SHOWN} are shown"
        remedy = "Correct them"
        if self._num_sound:
            remedy = "Set tokenizer.chat_template to a template that renders answers whole"
            remedy += ": the rows are sound" if self._num_sound == self.num_errors else ", and correct the other rows"
        if self._configured and any_left:
            settings = " and ".join(f"{setting}=quarantine" for setting in self._settings)
            remedy += f", or set {settings} to continue without such rows"
        raise DataError("\n".join([f"{rows} cannot be used{shown}:", *map(str, self._shown), f"{remedy}."]))


def read_rows(config: RowsConfig, problems: RowProblems, templates: Sequence[str] = ()) -> list[Row]:
    """Read at most `config.max_rows` rows, with refused ones; `templates`: the needed ones. Raises ConfigError or DataError."""
    if wrong := check_data("data", config, templates):
        raise ConfigError(wrong)
    rows: list[Row] = []
    num_seen = 0
    files = [(file, source) for source in config.sources for file in data_files(source.path, problems.quarantine.note)]
    for path, named in files:
        source = Source(str(named.path), named.weight)
        before = num_seen
        for line, content in file_rows(path):
            problems.quarantine.progress(f"reading {path}: {num_seen} rows")
            if config.max_rows is not None and num_seen == config.max_rows:
                break
            if isinstance(content, DataError):
                problems.report(str(path), line, str(content), config.bad_rows)
            else:
                rows.append(Row(num_seen, str(path), line, content, source))
            num_seen += 1
        else:
            if num_seen == before:
                problems.quarantine.note(f"{path} holds no row")
    if not rows:
        require_some(0, config, problems)
    return rows


def require_some(usable: int, config: RowsConfig, problems: RowProblems, sources: Collection[Source] | None = None) -> None:
    """Raise DataError if no row is usable, or none of an entry of `data.path` with a weight (`sources`: of the usable rows)."""
    problems.raise_errors(any_left=usable > 0)
    if usable:
        paths = {path for path, _ in sources or ()}
        for named in config.sources if sources is not None and config.max_rows is None else ():
            if named.weight != 1 and str(named.path) not in paths:
                raise DataError(
                    f"{named.path} in data.path has the weight {named.weight:g}, but no usable row; correct its rows, or remove "
                    "the entry"
                )
        return
    names, num_aside = ", ".join(str(source.path) for source in config.sources), problems.num_quarantined
    if not num_aside:
        raise DataError(f"data.path={names} holds no row; at least one is needed: name a file with rows in it (docs/data.md).")
    first = problems.quarantine.entries[-num_aside]
    raise DataError(
        f"data.path={names}: all {num_aside} rows were set aside, none is left; the first ({first['file']}:{first['line']}) "
        f"because: {first['reason']}. Correct the file, or the settings that the reasons name."
    )
