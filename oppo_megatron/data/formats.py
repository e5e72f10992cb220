"""The layout of prompt and answers in the rows of a data set: detected from columns and the form of their values, or as set.

columns     a column each, text or messages
alpaca      `instruction`, to which a text in `input` (Dolly: `context`) is joined by a blank line; `output`
sharegpt    `conversations`: messages of `from` (human, gpt, system) and `value`
messages    `messages`: messages of `role` and `content`
hh          no prompt: `chosen` and `rejected` are dialogues, "\\n\\nHuman: ...\\n\\nAssistant: ..."

The prompt is the same for every command: found without regard to the answers that a command wants.  A column of messages is
preferred to text, and dialogues in `chosen` and `rejected` are preferred to a prompt's text.  Rows that can be read in two ways
are refused with both, and the setting that chooses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from oppo_megatron.config.data import KNOWN_NAMES, RowsConfig
from oppo_megatron.data.columns import (
    ASSISTANT_MARK,
    find_column,
    is_filled,
    require_column,
    role_of,
    sampled,
    usable_columns,
)
from oppo_megatron.data.conversations import ARGUMENTS, FOR_TEMPLATES
from oppo_megatron.data.rows import Row
from oppo_megatron.errors import DataError

Wanted = Literal["prompt", "completion", "pair", "steps"]
TITLES = {"alpaca": "Alpaca", "sharegpt": "ShareGPT", "messages": "chat messages", "hh": "HH dialogues"}
ADDED = ("input", "context")
SYSTEM = ("system", "system_prompt")
SPOKEN = ("sharegpt", "messages")
"""Forms of a dialogue that is not text."""
NUM_NAMED = 8
"""Most unread columns that are named; the others are counted."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of each part.

    `prompt` None: the common beginning of the answers.  `added`: joined to the prompt's text.  `chat`: a prompt that is text is
    a user's turn.  `completion` None if answers are wanted: they are the assistant's turns of the prompt's messages.
    `unread`: columns that no part is read from.
    """

    format: str
    prompt: str | None
    added: str | None = None
    system: str | None = None
    chat: bool = False
    completion: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    unread: tuple[str, ...] = ()

    def describe(self, wanted: Wanted, turns: str) -> str:
        """Return how the rows were understood, as a line to be shown."""
        added = f" and {self.added!r}" if self.added else ""
        prompt = f"prompt from {self.prompt!r}{added}"
        if self.prompt is None:
            prompt = (
                f"prompt and answer from {self.chosen or self.completion!r}"
                if wanted == "completion"
                else ("prompt from what 'chosen' and 'rejected' begin with")
            )
        elif self.chat and self.format not in SPOKEN:
            prompt += " (as a user's turn of the chat template)"
        parts = [prompt, *([f"system message from {self.system!r}"] if self.system else [])]
        if wanted == "pair":
            parts.append(f"answers from {self.chosen!r} and {self.rejected!r}")
        elif wanted == "completion" and self.prompt is not None:
            last = "the last assistant's turn" if turns == "last" else "each assistant's turn"
            parts.append(
                f"completion from {self.completion!r}" if self.completion else f"completion from its {last[4:]}"
            )
        return f"rows read as {TITLES.get(self.format, 'columns')}: {', '.join(parts)}{self._left(wanted)}"

    def _left(self, wanted: Wanted) -> str:
        """Return the end of that line: the columns that the model does not read."""
        if not self.unread:
            return ""
        named, more = self.unread[:NUM_NAMED], len(self.unread) - NUM_NAMED
        names = ", ".join(map(repr, named)) + (f" and {more} more" if more > 0 else "")
        return f"; for rewards alone: {names}" if wanted == "prompt" else f"; not read: {names}"


def recognise(config: RowsConfig, rows: Sequence[Row], wanted: Wanted, used: Sequence[str] = ()) -> Layout:
    """Return the layout of the rows; `used`: columns that the caller reads by itself.

    Raises DataError if a part is in no column, if the set format does not fit, or if the rows can be read in two ways.
    """
    layout = _columns_of(config, rows, wanted)
    if config.format not in ("auto", layout.format):
        names = Counter(name for row in rows for name in row.values)
        raise DataError(
            f"data.format is {config.format}, but the rows of {rows[0].file} are not {TITLES.get(config.format, 'columns')} "
            f"({_needs(config.format)}; it has: {', '.join(names)}); set data.format=auto, or name the columns in "
            "data.columns"
        )
    answers = {"pair": [layout.chosen, layout.rejected], "completion": [layout.completion]}.get(wanted, [])
    if layout.prompt is None:
        answers = [layout.chosen, layout.rejected]
    read = {name.partition(".")[0] for name in (layout.prompt, layout.added, layout.system, *answers, *used) if name}
    if layout.chat or layout.format in SPOKEN:
        read |= {*FOR_TEMPLATES, ARGUMENTS}  # the chat template reads them, or it is said that it does not
    filled = Counter(name for row in sampled(rows) for name, value in row.values.items() if is_filled(value))
    return replace(layout, unread=tuple(name for name in filled if name not in read))


def _columns_of(config: RowsConfig, rows: Sequence[Row], wanted: Wanted) -> Layout:
    find = require_column if wanted == "pair" else find_column
    chosen, rejected = (find(part, config.columns, rows) for part in ("chosen", "rejected"))
    prompt = _prompt_column(config, rows, chosen, rejected)
    answer = getattr(config.columns, "completion", None) if wanted == "completion" else None
    apart = answer or wanted == "steps" or (wanted == "prompt" and rejected is None)
    if prompt is None and (chosen is None or apart or _is_apart(config, rows, chosen)):
        prompt = require_column("prompt", config.columns, rows)
    if prompt is None:
        is_text = any(is_dialogue(row.get(chosen)) for row in rows)
        form = "hh" if is_text else _form(rows, chosen)
        system = None if is_text else _first(SYSTEM, rows)
        return Layout(form, None, system=system, chosen=chosen, rejected=rejected)
    added = _added_column(config, rows, prompt)
    named = config.columns.prompt is not None or prompt == "instruction"
    form = "alpaca" if added or (config.format == "alpaca" and named) else _form(rows, prompt)
    if config.format == "messages" and config.columns.prompt is not None and form == "columns":
        form = "messages"  # text in the named column: a user's turn
    system = _first(SYSTEM, rows) if config.format != "columns" or form in SPOKEN else None
    answers = [chosen, rejected, find_column("completion", config.columns, rows), *KNOWN_NAMES["completion"]]
    chat = bool(system) or form in SPOKEN or any(_form(rows, name) in SPOKEN for name in answers)
    completion = _completion_column(config, rows, prompt, form, chosen) if wanted == "completion" else None
    return Layout(form, prompt, added, system, chat, completion, chosen, rejected)


def _is_apart(config: RowsConfig, rows: Sequence[Row], chosen: str | None) -> bool:
    """True if chosen answers are not dialogues, and another column may be their prompt."""
    if config.format == "hh" or _form(rows, chosen) in SPOKEN or any(is_dialogue(row.get(chosen)) for row in rows):
        return False
    return not {*usable_columns(rows)} <= {chosen, *KNOWN_NAMES["rejected"], *SYSTEM}


def _prompt_column(config: RowsConfig, rows: Sequence[Row], chosen: str | None, rejected: str | None) -> str | None:
    """Return the column of the prompt; None if chosen and rejected hold it."""
    if config.format == "hh":
        return None
    if config.columns.prompt is not None:
        return find_column("prompt", config.columns, rows)
    if config.format == "alpaca":
        return _first(("instruction",), rows)
    names = [name for name in KNOWN_NAMES["prompt"] if _is_frequent(rows, name)]
    spoken = [name for name in names if _form(rows, name) in (SPOKEN if config.format == "auto" else (config.format,))]
    if config.format in SPOKEN or (config.format == "auto" and spoken):
        return _only_dialogue(spoken, rows)
    if config.format == "auto" and chosen and rejected and all(_are_whole(rows, name) for name in (chosen, rejected)):
        return None
    texts = [name for name in names if _form(rows, name) == "columns"]
    found = find_column("prompt", config.columns, rows, texts or None)
    if found in (None, "prompt"):  # its name decides
        return found
    return _only("prompt", [found, *(name for name in texts if name != found)], rows)


def _only_dialogue(names: Sequence[str], rows: Sequence[Row]) -> str | None:
    """Return the column of messages; of several with the same prompts, the one with answers."""
    if len(names) < 2:
        return next(iter(names), None)
    _only("prompt", names, rows, _asked)
    return max(names, key=lambda name: _share_answered(rows, name))


def _completion_column(
    config: RowsConfig, rows: Sequence[Row], prompt: str, form: str, chosen: str | None
) -> str | None:
    """Return the column of the answers; None if they are turns of the prompt's messages."""
    if getattr(config.columns, "completion", None) is not None:
        return find_column("completion", config.columns, rows)
    names = [name for name in KNOWN_NAMES["completion"] if _is_frequent(rows, name)]
    names = [name for name in [*names, chosen] if name is not None]
    share = _share_answered(rows, prompt)
    if form in SPOKEN and (share > 0.5 or (share and not names)):
        if prompt == "prompt" and names and config.format == "auto":
            raise DataError(
                f"{_two_ways(rows, 'answer', names[0], 'the last turn of prompt')}; set data.columns.completion={names[0]} or "
                f"data.format={form}"
            )
        return None
    if len(names) > 1 and "answer" in names:  # next to another column it is the short reference
        names.remove("answer")
    if names:
        return _only("completion", names, rows)
    try:
        return require_column("completion", config.columns, rows)
    except DataError as error:
        if form not in SPOKEN:
            raise
        raise DataError(f"column {prompt!r} does not end with an assistant's turn, and {error}") from error


def _bare(value: Any) -> str:
    return str(value).strip()


def _only(part: str, names: Sequence[str], rows: Sequence[Row], form: Callable[[Any], Any] = _bare) -> str:
    """Return the first of the columns.  Raises DataError if another one differs from it in some row."""
    for other in names[1:]:
        for row in rows:
            one, two = row.get(names[0]), row.get(other)
            if is_filled(one) and is_filled(two) and form(one) != form(two):
                raise DataError(
                    f"{_two_ways(rows, part, names[0], other)} (row {row.line} has both, and they differ); set "
                    f"data.columns.{part}={names[0]} or data.columns.{part}={other}"
                )
    return names[0]


def _two_ways(rows: Sequence[Row], part: str, one: str, other: str) -> str:
    return f"{rows[0].file} can be read in two ways: the {part} may be {one} or {other}"


def _asked(messages: Any) -> list[tuple[Any, str]]:
    """Return the roles and texts of a dialogue before its final answer."""
    turns = [] if form_of(messages) == "columns" or isinstance(messages, dict) else list(messages)
    end = len(turns) - (bool(turns) and role_of(turns[-1]) == "assistant")
    return [(role_of(turn), str(turn.get("content", turn.get("value"))).strip()) for turn in turns[:end]]


def _added_column(config: RowsConfig, rows: Sequence[Row], prompt: str) -> str | None:
    if config.format != "alpaca" and (config.format != "auto" or prompt != "instruction"):
        return None
    return next((name for name in ADDED if any(isinstance(row.get(name), str) for row in rows)), None)


def _form(rows: Sequence[Row], column: str | None) -> str:
    """Return `sharegpt` or `messages` if most values of the column are such lists, else `columns`."""
    forms = Counter(form_of(value) for value in _values(rows, column))
    return max(forms, key=lambda form: forms[form], default="columns")


def form_of(value: Any) -> str:
    """Return the form of one value, by the keys of its first message."""
    messages = value if isinstance(value, list) and value else [value]
    if not all(isinstance(message, dict) for message in messages) or messages[0].keys().isdisjoint(("role", "from")):
        return "columns"
    first = messages[0]
    return "sharegpt" if first.get("from") is not None and first.get("role") is None else "messages"


def is_dialogue(value: Any) -> bool:
    """True for text in which a human and an assistant alternate."""
    return isinstance(value, str) and value.lstrip().startswith("Human:") and ASSISTANT_MARK in value


def _share_answered(rows: Sequence[Row], column: str) -> float:
    """Return the share of the column's dialogues that end with an assistant's turn."""
    ends = [role_of(value[-1]) for value in _dialogues(rows, column)]
    return ends.count("assistant") / max(1, len(ends))


def _are_whole(rows: Sequence[Row], column: str) -> bool:
    """True if the column has messages, and most of its values do not begin with the assistant's turn."""
    begins = [role_of(value[0]) for value in _dialogues(rows, column)]
    return len(begins) > begins.count("assistant") * 2


def _dialogues(rows: Sequence[Row], column: str) -> Iterator[list[Any]]:
    return (value for value in _values(rows, column) if isinstance(value, list) and form_of(value) != "columns")


def _values(rows: Sequence[Row], column: str | None) -> Iterator[Any]:
    return (value for row in sampled(rows) if is_filled(value := row.get(column)))


def _is_frequent(rows: Sequence[Row], column: str) -> bool:
    """True if the column is filled in at least half of the rows."""
    return 2 * sum(1 for _ in _values(rows, column)) >= len(sampled(rows))


def _first(names: Sequence[str], rows: Sequence[Row]) -> str | None:
    return next((name for name in names if any(row.get(name) for row in rows)), None)


def _needs(form: str) -> str:
    return {
        "columns": f"a column of text for the prompt, {', '.join(KNOWN_NAMES['prompt'])}",
        "alpaca": "columns instruction and output, and input if there is one",
        "sharegpt": "a column conversations with lists of from and value",
        "messages": "a column messages with lists of role and content",
        "hh": "columns chosen and rejected that begin with `Human:` and hold `Assistant:`",
    }[form]
