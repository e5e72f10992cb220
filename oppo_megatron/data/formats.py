"""The layout of prompt and answers in the rows of a data set: detected from columns and the form of their values, or as set.

columns     a column each, text or messages
alpaca      `instruction`, to which a text in `input` (Dolly: `context`) is joined by a blank line; `output`
sharegpt    `conversations`: messages of `from` (human, gpt, system) and `value`
messages    `messages`: messages of `role` and `content`
hh          no prompt: `chosen` and `rejected` are dialogues, "\\n\\nHuman: ...\\n\\nAssistant: ..."
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oppo_megatron.config.data import KNOWN_NAMES, RowsConfig
from oppo_megatron.data.columns import ASSISTANT_MARK, find_column, require_column, role_of
from oppo_megatron.data.rows import Row
from oppo_megatron.errors import DataError

Wanted = Literal["prompt", "completion", "pair", "steps"]
TITLES = {"alpaca": "Alpaca", "sharegpt": "ShareGPT", "messages": "chat messages", "hh": "HH dialogues"}
ADDED = ("input", "context")
DIALOGUES = ("conversations", "conversation", "messages", "prompt")
SYSTEM = ("system", "system_prompt")


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of each part.  `prompt` None: the common beginning of the answers; `added`: joined to the prompt's text;
    `completion` None where answers are wanted: they are the assistant's turns of the prompt's messages.
    """

    format: str
    prompt: str | None
    added: str | None = None
    system: str | None = None
    completion: str | None = None
    chosen: str | None = None
    rejected: str | None = None

    def describe(self, wanted: Wanted, turns: str) -> str:
        """What was understood, as a line to be shown."""
        added = f" and {self.added!r}" if self.added else ""
        prompt = f"prompt from {self.prompt!r}{added}"
        if self.prompt is None:
            prompt = (
                f"prompt and answer from {self.chosen or self.completion!r}"
                if wanted == "completion"
                else ("prompt from what 'chosen' and 'rejected' begin with")
            )
        parts = [prompt]
        if wanted == "pair":
            parts.append(f"answers from {self.chosen!r} and {self.rejected!r}")
        elif wanted == "completion" and self.prompt is not None:
            last = "the last assistant's turn" if turns == "last" else "each assistant's turn"
            parts.append(
                f"completion from {self.completion!r}" if self.completion else f"completion from its {last[4:]}"
            )
        return f"rows read as {TITLES.get(self.format, 'columns')}: {', '.join(parts)}"


def recognise(config: RowsConfig, rows: Sequence[Row], wanted: Wanted) -> Layout:
    """The layout of the rows.  Raises DataError where a part is in no column, or the set format does not fit."""
    layout = _columns_of(config, rows, wanted)
    if config.format not in ("auto", layout.format):
        raise DataError(
            f"data.format is {config.format}, but the rows of {rows[0].file} are no {TITLES.get(config.format, 'columns')} "
            f"({_needs(config.format)}; it has: {', '.join(_names(rows))}); set data.format=auto, or name the columns in "
            "data.columns"
        )
    return layout


def _columns_of(config: RowsConfig, rows: Sequence[Row], wanted: Wanted) -> Layout:
    chosen = find_column("chosen", config.columns, rows)
    rejected = find_column("rejected", config.columns, rows)
    if wanted == "pair":
        chosen = require_column("chosen", config.columns, rows)
        rejected = require_column("rejected", config.columns, rows)
    prompt = _prompt_column(config, rows, wanted)
    if prompt is None:
        if chosen is None or (wanted == "prompt" and rejected is None):
            prompt = require_column("prompt", config.columns, rows)
        is_text = any(is_dialogue(row.values.get(chosen or "")) for row in rows)
        form = "hh" if is_text else _form(rows, chosen)
        return Layout(form, None, chosen=chosen, rejected=rejected)
    added = _added_column(config, rows, prompt)
    form = "alpaca" if added or config.format == "alpaca" else _form(rows, prompt)
    system = _first(SYSTEM, rows) if form in ("sharegpt", "messages") else None
    completion = _completion_column(config, rows, prompt, form, chosen) if wanted == "completion" else None
    return Layout(form, prompt, added, system, completion, chosen, rejected)


def _prompt_column(config: RowsConfig, rows: Sequence[Row], wanted: Wanted) -> str | None:
    """None where chosen and rejected hold the prompt."""
    if config.format == "hh":
        return None
    if config.columns.prompt is not None:
        return find_column("prompt", config.columns, rows)
    if config.format == "alpaca":
        return _first(("instruction",), rows)
    if config.format in ("sharegpt", "messages"):
        return next((name for name in DIALOGUES if _form(rows, name) == config.format), None)
    found = find_column("prompt", config.columns, rows)
    if wanted != "completion" or found is None or _form(rows, found) != "columns":
        return found
    if find_column("completion", config.columns, rows) is not None:
        return found
    return next((name for name in DIALOGUES if _form(rows, name) != "columns"), found)


def _completion_column(
    config: RowsConfig, rows: Sequence[Row], prompt: str, form: str, chosen: str | None
) -> str | None:
    """None where the answers are turns of the prompt's messages."""
    found = find_column("completion", config.columns, rows)
    asked = chosen is not None and not _are_answered(rows, prompt)
    if found is None and (asked or form not in ("sharegpt", "messages")):
        found = chosen or require_column("completion", config.columns, rows)
    return found


def _added_column(config: RowsConfig, rows: Sequence[Row], prompt: str) -> str | None:
    if config.format not in ("auto", "alpaca") or prompt != "instruction":
        return None
    return next((name for name in ADDED if any(isinstance(row.values.get(name), str) for row in rows)), None)


def _form(rows: Iterable[Row], column: str | None) -> str:
    """`sharegpt` or `messages` where most values of the column are such lists, else `columns`."""
    forms = Counter(form_of(row.values[column]) for row in rows if column in row.values)
    return max(forms, key=lambda form: forms[form], default="columns")


def form_of(value: Any) -> str:
    """Of one value: by the keys of its first message."""
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return "columns"
    return "sharegpt" if value[0].get("from") is not None and value[0].get("role") is None else "messages"


def is_dialogue(value: Any) -> bool:
    """Text in which a human and an assistant take turns."""
    return isinstance(value, str) and value.lstrip().startswith("Human:") and ASSISTANT_MARK in value


def _are_answered(rows: Sequence[Row], column: str) -> bool:
    """Whether some messages of the column end with an assistant's turn."""
    lists = [row.values[column] for row in rows if form_of(row.values.get(column)) != "columns"]
    return any(role_of(messages[-1]) == "assistant" for messages in lists)


def _first(names: Sequence[str], rows: Sequence[Row]) -> str | None:
    return next((name for name in names if any(row.values.get(name) for row in rows)), None)


def _names(rows: Sequence[Row]) -> list[str]:
    return list(Counter(name for row in rows for name in row.values))


def _needs(form: str) -> str:
    return {
        "columns": f"a column of text for the prompt, {', '.join(KNOWN_NAMES['prompt'])}",
        "alpaca": "columns instruction and output, and input where there is one",
        "sharegpt": "a column conversations with lists of from and value",
        "messages": "a column messages with lists of role and content",
        "hh": "columns chosen and rejected that begin with `Human:` and hold `Assistant:`",
    }[form]
