from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from oppo_megatron.config.data import KNOWN_NAMES
from oppo_megatron.data.rows import Row
from oppo_megatron.errors import DataError
from oppo_megatron.records import field_at, field_names, nearest_field

Message = dict[str, Any]

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
         "model": "assistant", "bot": "assistant", "function_response": "tool", "observation": "tool"}  # fmt: skip
"""Speakers in ShareGPT files, and their roles in chat templates."""
SAMPLED = 2000
LISTED = ("label", "completions", "labels")
"""The parts that are not text."""
NEVER_ASKED = {"role", "from", "system_prompt", "message_id", "version"}
"""Columns of published data that resemble a part's name but are never suggested."""


def is_filled(value: Any) -> bool:
    """True if not empty: files with a schema have all columns in every row."""
    return value is not None and value != [] and not (isinstance(value, str) and not value.strip())


def role_of(message: Message) -> Any:
    role = message.get("role") or message.get("from")
    return ROLES.get(role, role) if isinstance(role, str) else role


def form_of(value: Any) -> str:
    """`sharegpt` or `messages`, by the keys of the first message; else `columns`."""
    messages = value if isinstance(value, list) and value else [value]
    if not all(isinstance(message, dict) for message in messages) or messages[0].keys().isdisjoint(("role", "from")):
        return "columns"
    first = messages[0]
    return "sharegpt" if first.get("from") is not None and first.get("role") is None else "messages"


class Table:
    """Columns, judged by at most twice SAMPLED rows spread over the data."""

    def __init__(self, rows: Sequence[Row]):
        self.rows, self.file = rows, rows[0].file
        self.sampled = rows[:: len(rows) // SAMPLED or 1]

    def filled(self, column: str | None) -> list[Any]:
        return [value for row in self.sampled if is_filled(value := row.get(column))]

    def form(self, column: str | None) -> str:
        forms = Counter(map(form_of, self.filled(column)))
        return max(forms, key=lambda form: forms[form], default="columns")

    def dialogues(self, column: str | None) -> list[list[Message]]:
        return [value for value in self.filled(column) if isinstance(value, list) and form_of(value) != "columns"]

    def share_answered(self, column: str) -> float:
        ends = [role_of(dialogue[-1]) for dialogue in self.dialogues(column)]
        return ends.count("assistant") / max(1, len(ends))

    def frequent(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if 2 * len(self.filled(name)) >= len(self.sampled)]

    def first(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if any(row.get(name) for row in self.rows)), None)

    def usable(self) -> list[str]:
        """Columns (or fields) with text or messages in the first non-empty row."""
        first = next((row.values for row in self.rows if row.values), {})
        values = {name: field_at(first, name) for name in field_names(first)}
        return [
            name
            for name, value in values.items()
            if isinstance(value, str)
            or (value and isinstance(value, list) and all(isinstance(item, dict) and role_of(item) is not None for item in value))
        ]

    def find(self, part: str, columns: Mapping[Any, str], names: Sequence[str] | None = None) -> str | None:
        """The configured column, else the known name (or one of `names`) most often filled, or None. Raises DataError."""
        wanted = columns.get(part)
        if wanted is not None:
            if all(row.get(wanted) is None for row in self.rows):
                there_are = self._there_are([wanted], part)
                raise DataError(f"data.columns.{part}={wanted} is not a column of {self.file}; {there_are}")
            return wanted
        known = names or KNOWN_NAMES[part]
        counts = {name: sum(is_filled(row.values.get(name)) for row in self.sampled) for name in known}
        if not any(counts.values()):
            counts = {name: sum(name in row.values for row in self.sampled) for name in known}
        best = max(counts, key=lambda name: counts[name])
        return best if counts[best] else None

    def require(self, part: str, columns: Mapping[Any, str]) -> str:
        """`find`, but raises DataError if there is none."""
        found = self.find(part, columns)
        if found is not None:
            return found
        there_are, first = self._there_are(KNOWN_NAMES[part], part), self.rows[0].values
        wrapped = [name for name, value in first.items() if isinstance(value, list) and len(value) > 1]
        wrapped = [name for name in wrapped if all(isinstance(item, dict) and role_of(item) is None for item in first[name])]
        usable = self.usable()
        numbered = ((a, b) for a in usable for b in usable if a < b and a[:-1] == b[:-1])  # `response_0`, `response_1`
        if wrapped and len(self.rows) == 1:
            there_are = (
                f"its only object has the rows in {wrapped[0]!r}: write that list as the file, "
                f"`jq .{wrapped[0]} {self.file} > rows.json`."
            )
        elif part == "chosen" and self.find("completions", columns):
            there_are = 'its rows have steps: for a process reward model set separator, as in `separator: "\\n"` (`oppo rm`)'
        elif part == "chosen" and self.find("label", columns):
            there_are = "its rows have a label: for completions that are wanted or unwanted set dpo.loss=kto (`oppo dpo`)"
        elif part in ("chosen", "rejected") and (pair := next(numbered, None)):
            there_are = (
                f"it has {pair[0]!r} and {pair[1]!r}, which look like two answers: if the same one is the better in every row, "
                "name them in data.columns.chosen and data.columns.rejected; if another column says which one is, write chosen "
                "and rejected by it"
            )
        names = ", ".join(KNOWN_NAMES[part])
        raise DataError(f"{self.file} has no column for the {part} (looked for {names}); {there_are}")

    def _there_are(self, wanted: Sequence[str], part: str) -> str:
        names = dict.fromkeys(name for row in self.rows for name in field_names(row.values))
        others = {name for other, known in KNOWN_NAMES.items() if other != part for name in known} | NEVER_ASKED
        found = names if part in LISTED else self.usable()
        usable = [name for name in found if name.rpartition(".")[2].lower() not in others]
        near, setting = nearest_field(wanted, usable), f"data.columns.{part}"
        if not usable:
            remedy = f"None of them can be it: add one, or name one in {setting}."
        elif near:
            remedy = f"The nearest is {near!r}: set {setting}={near}."
        else:
            remedy = f"Set {setting} to one of them."
        return f"it has: {', '.join(names) or 'no column at all'}. {remedy}"
