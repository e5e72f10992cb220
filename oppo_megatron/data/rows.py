"""Rows of a data set: JSONL files or a saved Hugging Face data set, each row with the place it came from.

A refused row is never dropped in silence.  Under policy `error` all refused rows are gathered into one `DataError`;
under `quarantine` they are set aside, with file, line and reason, and reading goes on.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oppo_megatron.config.checks import check_data
from oppo_megatron.config.data import DataConfig
from oppo_megatron.errors import ConfigError, DataError

Policy = Literal["error", "quarantine"]
NUM_SHOWN = 20
BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"
DEEPEST = 100
"""Lists and objects within each other in a row; so that whoever writes the row again finds it within its own limits, too."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its position in the data set (refused rows counted, from 0), its place, and its columns."""

    index: int
    file: str
    line: int
    values: dict[str, Any]


@dataclass(slots=True)
class Quarantine:
    """Rows that were refused and set aside; each entry has `file`, `line` and `reason`."""

    entries: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, file: str, line: int, reason: str) -> None:
        """Set one row aside."""
        self.entries.append({"file": file, "line": line, "reason": reason})

    def write(self, path: Path) -> None:
        """Write the entries as JSONL, replacing the file as a whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries), encoding="utf-8")
        os.replace(partial, path)


class RowProblems:
    """What is wrong with the rows of one data set, each handled by the policy of the setting it falls under.

    `configured` is false where the user has no configuration, hence no setting that would set rows aside.
    """

    def __init__(self, quarantine: Quarantine, configured: bool = True):
        self.quarantine = quarantine
        self._configured = configured
        self.num_errors = 0
        self.num_quarantined = 0
        self._shown: list[str] = []
        self._settings: list[str] = []

    def report(self, file: str, line: int, reason: str, policy: Policy, setting: str = "data.bad_rows") -> None:
        """Note one refused row.  `setting` is what the user would change to set such rows aside."""
        if policy == "quarantine":
            self.num_quarantined += 1
            self.quarantine.add(file, line, reason)
            return
        self.num_errors += 1
        if len(self._shown) < NUM_SHOWN:
            self._shown.append(f"  {file}:{line}: {reason}")
        if setting not in self._settings:
            self._settings.append(setting)

    def raise_errors(self) -> None:
        """Raise one `DataError` for all rows refused under policy `error`, if any."""
        if not self.num_errors:
            return
        rows = "1 row" if self.num_errors == 1 else f"{self.num_errors} rows"
        shown = "" if self.num_errors <= NUM_SHOWN else f", the first {NUM_SHOWN} are shown"
        remedy = " and ".join(f"{setting}=quarantine" for setting in self._settings)
        raise DataError(
            f"{rows} cannot be used{shown}:\n"
            + "\n".join(self._shown)
            + (
                f"\nCorrect them, or set {remedy} to go on without such rows."
                if self._configured
                else "\nCorrect them."
            )
        )


def read_rows(config: DataConfig, problems: RowProblems, templates: Sequence[str] = ()) -> list[Row]:
    """All rows of `config.path` (at most `config.max_rows`, refused rows counted), in order.

    `templates` names the templates that the rows will need (`prompt`, `completion`).  Raises `ConfigError` if a path or
    template is wrong, `DataError` if there is no row; rows that are not JSON objects go to `problems`.
    """
    wrong = check_data("data", config, templates)
    if wrong:
        raise ConfigError(wrong)
    paths = config.path if isinstance(config.path, list) else [config.path]
    rows: list[Row] = []
    num_seen = 0
    for path in paths:
        read = _directory_rows(path) if path.is_dir() else _jsonl_rows(path)
        for line, content in read:
            if config.max_rows is not None and num_seen == config.max_rows:
                break
            if isinstance(content, DataError):
                problems.report(str(path), line, str(content), config.bad_rows)
            else:
                rows.append(Row(num_seen, str(path), line, content))
            num_seen += 1
    if not rows:
        problems.raise_errors()
        raise DataError(_nothing_left(paths, problems, num_seen))
    return rows


def require_some(usable: int, config: DataConfig, problems: RowProblems) -> None:
    """Raise the gathered errors, or a `DataError` if every row was set aside."""
    problems.raise_errors()
    if not usable:
        paths = config.path if isinstance(config.path, list) else [config.path]
        raise DataError(_nothing_left(paths, problems, problems.num_quarantined))


def _nothing_left(paths: list[Path], problems: RowProblems, num_seen: int) -> str:
    names = ", ".join(str(path) for path in paths)
    if num_seen == 0:
        return f"data.path={names} holds no row; at least one is needed: name a file with one JSON object a line."
    first = problems.quarantine.entries[-problems.num_quarantined]
    return (
        f"data.path={names}: all {num_seen} rows were set aside, none is left; the first "
        f"({first['file']}:{first['line']}) because: {first['reason']}. Correct the "
        "file, or the settings that the reasons name."
    )


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
    """(line number from 1, the object or why it is refused).  Blank lines at the end of the file are no rows."""
    blank: list[int] = []
    with path.open("rb") as stream:
        for line, raw in enumerate(stream, start=1):
            if not raw.strip():
                blank.append(line)
                continue
            yield from ((number, DataError("the line is blank")) for number in blank)
            blank.clear()
            try:
                yield line, _parse(raw.removeprefix(BOM) if line == 1 else raw)
            except DataError as refusal:
                yield line, refusal


def _parse(raw: bytes) -> dict[str, Any]:
    _check_bytes(raw)
    try:
        value = json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_distinct
        )
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f'a JSON {type(value).__name__}, not an object; each row is written {{"column": value, ...}}')
    _check_depth(value)
    if b"\\u" in raw:  # what is no text can come in by an escape only
        _check_texts(value)
    return value


def _check_bytes(raw: bytes) -> None:
    """Name what the JSON reader would call an unexpected character."""
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError("not UTF-8 but UTF-16, by its byte order mark; save the file as UTF-8")
    if raw.startswith(GZIP):
        raise DataError("compressed by gzip; unpack the file")
    if (place := raw.find(b"\0")) >= 0:
        raise DataError(f"a NUL byte (byte {place} of the line); the file is binary, damaged, or UTF-16")
    if raw.startswith(BOM):
        raise DataError("a byte order mark, which only the first line of a file may begin with; remove it")


def _check_depth(row: dict[str, Any]) -> None:
    """Raise DataError for columns that are nested beyond `DEEPEST`."""
    level: list[Any] = [row]
    for _ in range(DEEPEST + 1):
        level = [part for item in level for part in (item.values() if isinstance(item, dict) else item) if _holds(part)]
        if not level:
            return
    raise DataError(f"lists or objects are nested deeper than {DEEPEST}; leave them out, or flatten them")


def _holds(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple))


def _check_texts(row: dict[str, Any]) -> None:
    """Raise DataError for a column with NUL or half of a surrogate pair, which neither UTF-8 nor a tokenizer takes."""
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
    """Every text in a JSON value, names included, however deep it is."""
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
    """An object whose names are all different: of two values of one name, JSON does not say which is meant."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if any(name == other for other, _ in pairs[:i]))
        raise ValueError(f"the name {twice!r:.60} comes twice in one object")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _readable(path: Path, loaded: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The rows; DataError where the files behind them are damaged, which shows as they are read."""
    rows = iter(loaded)
    while True:
        try:
            row = next(rows, None)
        except Exception as error:
            raise DataError(f"data.path={path}: cannot be read ({error}); write it again with save_to_disk.") from error
        if row is None:
            return
        yield dict(row)


def _directory_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
    """Rows of a directory that `datasets.Dataset.save_to_disk` wrote, numbered from 1."""
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        inside = ", ".join(sorted(file.name for file in path.glob("*.jsonl"))) or "none"
        raise DataError(
            f"data.path={path} is a directory but not a saved Hugging Face data set (it has no state.json or "
            "dataset_dict.json). Name one written by `save_to_disk`, or JSONL files (in this directory: "
            f"{inside})."
        )
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"data.path={path} is a Hugging Face data set, and reading one needs the `datasets` package: "
            "`pip install oppo-megatron[datasets]`, or write the rows as JSONL (`Dataset.to_json`)."
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
        try:
            _check_depth(row)
            _check_texts(row)
            yield line, row
        except DataError as refusal:
            yield line, refusal
