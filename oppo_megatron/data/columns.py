"""The columns of a row by their part, and the forms of their values.

Known names, in the order in which they are tried (GSM8K's, TRL's, OpenAI's, Alpaca's, ShareGPT's, NuminaMath's):

    prompt      prompt, question, instruction, problem, query, messages, conversations, conversation
    completion  completion, response, output, solution, answer
    chosen      chosen
    rejected    rejected
    label       label
    completions completions, steps
    labels      labels

A name `a.b` is key `b` of the objects in column `a`.  A value is text or a list of messages, `{"role": ..., "content": ...}` or
`{"from": ..., "value": ...}`.  If there is no prompt column but chosen and rejected are whole dialogues, the prompt is their
common beginning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

from oppo_megatron.config.data import KNOWN_NAMES, PromptColumnsConfig
from oppo_megatron.data.rows import Row
from oppo_megatron.errors import DataError
from oppo_megatron.records import field_at, field_names, nearest_field

Message = dict[str, Any]
Value = str | list[Message]

ASSISTANT_MARK, HUMAN_MARK = "\n\nAssistant:", "\n\nHuman:"
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
         "model": "assistant", "bot": "assistant", "function_response": "tool", "observation": "tool"}  # fmt: skip
"""Speakers of ShareGPT's files, and the roles of chat templates."""
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""True if a completion is wanted, by the lower-case text of its label."""
INSTEAD_OF_TEXT = ("tool_calls", "function_call")
"""Keys of a message that make its text optional."""
SAMPLED = 2000
LISTED = ("label", "completions", "labels")
"""The parts that are not text."""
NEVER_ASKED = {"role", "from", "system_prompt", "message_id", "version"}
"""Columns of published data whose names resemble a part's but are not suggested."""
UNLEARNED = ("weight", "loss_weight", "loss", "train", "training")
"""Keys of a message that mark it as not to be learned, by 0 or false (OpenAI's, ShareGPT's, Axolotl's)."""
KNOWN_ROLES = ("user", "assistant", "system", "tool")


def is_filled(value: Any) -> bool:
    """True if a column has something in it: files with a schema have all columns in every row."""
    return value is not None and value != [] and not (isinstance(value, str) and not value.strip())


def sampled(rows: Sequence[Row]) -> Sequence[Row]:
    """Return up to twice SAMPLED rows, spread over the data."""
    return rows[:: len(rows) // SAMPLED or 1]


def find_column(
    part: str, columns: PromptColumnsConfig, rows: Sequence[Row], names: Sequence[str] | None = None
) -> str | None:
    """Return the column that plays `part`: the configured one, else the known name, or one of `names`, that is filled in most
    rows (ties: documented order).

    None if no such name is there.  Raises `DataError` if the configured column is in no row.
    """
    wanted: str | None = getattr(columns, part, None)
    if wanted is None:
        some = sampled(rows)
        counts = {name: sum(is_filled(row.values.get(name)) for row in some) for name in names or KNOWN_NAMES[part]}
        counts = counts if any(counts.values()) else {name: sum(name in row.values for row in some) for name in counts}
        return max((name for name in counts if counts[name]), key=lambda name: counts[name], default=None)
    if all(row.get(wanted) is None for row in rows):
        raise DataError(f"data.columns.{part}={wanted} is not a column of {rows[0].file}; {_there_are(rows, [wanted], part)}")
    return wanted


def require_column(part: str, columns: PromptColumnsConfig, rows: Sequence[Row]) -> str:
    """`find_column`; if there is none, a `DataError` names the columns there are and the setting to use."""
    found = find_column(part, columns, rows)
    if found is None:
        names = KNOWN_NAMES[part]
        there_are = _there_are(rows, names, part)
        if (wrapped := _wrapped(rows)) is not None:
            there_are = (
                f"its only object has the rows in {wrapped!r}: write that list as the file, "
                f"`jq .{wrapped} {rows[0].file} > rows.json`."
            )
        elif part == "chosen" and find_column("completions", columns, rows):
            there_are = "its rows have steps: for a process reward model set separator, as in separator='\\n' (`oppo rm`)"
        elif part == "chosen" and find_column("label", columns, rows):
            there_are = "its rows have a label: for completions that are wanted or unwanted set dpo.loss=kto (`oppo dpo`)"
        elif part in ("chosen", "rejected") and (pair := _two_answers(rows)):
            there_are = (
                f"it has {pair[0]!r} and {pair[1]!r}, which look like two answers: if the same one is the better in every row, "
                "name them in data.columns.chosen and data.columns.rejected; if another column says which one is, write chosen "
                "and rejected by it"
            )
        raise DataError(f"{rows[0].file} has no column for the {part} (looked for {', '.join(names)}); {there_are}")
    return found


def _wrapped(rows: Sequence[Row]) -> str | None:
    """Return the column that holds all rows, if the file is one object around them."""
    lists = [name for name, value in rows[0].values.items() if isinstance(value, list) and len(value) > 1]
    return next(
        (name for name in lists if len(rows) == 1 and all(_is_row(item) for item in rows[0].values[name])),
        None,
    )


def _is_row(item: Any) -> bool:
    return isinstance(item, dict) and role_of(item) is None


def _two_answers(rows: Sequence[Row]) -> tuple[str, str] | None:
    """Return two columns of text or messages whose names differ in their last character (`response_0`, `response_1`)."""
    names = usable_columns(rows)
    pairs = ((one, other) for one in names for other in names if one < other and one[:-1] == other[:-1])
    return next(pairs, None)


def usable_columns(rows: Sequence[Row]) -> list[str]:
    """Return the names, those within objects too, that have text or messages in the first row that is not empty."""
    first = next((row.values for row in rows if row.values), {})
    values = {name: field_at(first, name) for name in field_names(first)}
    return [name for name, value in values.items() if isinstance(value, str) or (value and _are_messages(value))]


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) and not _is_row(item) for item in value)


def _there_are(rows: Sequence[Row], wanted: Sequence[str], part: str) -> str:
    names = dict.fromkeys(name for row in rows for name in field_names(row.values))
    others = {name for other, known in KNOWN_NAMES.items() if other != part for name in known} | NEVER_ASKED
    found = names if part in LISTED else usable_columns(rows)
    usable = [name for name in found if name.rpartition(".")[2].lower() not in others]
    near, setting = nearest_field(wanted, usable), f"data.columns.{part}"
    remedy = f"The nearest is {near!r}: set {setting}={near}." if near else f"Set {setting} to one of them."
    remedy = remedy if usable else f"None of them can be it: add one, or name one in {setting}."
    return f"it has: {', '.join(names) or 'no column at all'}. {remedy}"


def read_value(row: Row, column: str) -> Value:
    """The text or messages in `column`.  Raises `DataError` if missing, empty or of a wrong type."""
    value = row.require(column)
    if isinstance(value, str):
        return _checked_text(value, f"column {column!r}")
    if isinstance(value, dict) and ("role" in value or "from" in value):
        value = [value]
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        spoken = [item for i, item in enumerate(value) if i or not _is_silent_system(item)]
        return [
            _checked_message(item, f"message {i} of column {column!r}")
            for i, item in enumerate(spoken, start=1 + len(value) - len(spoken))
        ]
    if value == [] or value is None:
        raise DataError(f"column {column!r} is empty ({value!r})")
    if isinstance(value, dict) and (texts := [name for name in field_names({column: value}) if _is_text(row, name)]):
        raise DataError(f"column {column!r} is an object: name the key that holds the text, such as {texts[0]}")
    raise DataError(f"column {column!r} is neither text nor a list of messages, but {type(value).__name__}; write it as text")


def _is_text(row: Row, name: str) -> bool:
    return isinstance(field_at(row.values, name), str)


def read_label(row: Row, column: str) -> bool:
    """True if the row's completion is wanted.  Raises `DataError` for a value that is not a label."""
    value = row.require(column)
    said = LABELS.get(str(value).strip().lower())
    if said is None:
        raise DataError(
            f"column {column!r} is {value!r:.40}, which says neither that the completion is wanted (true, 1) nor that it is not "
            "(false, 0)"
        )
    return said


def read_texts(row: Row, column: str) -> list[str]:
    """The texts in `column`.  Raises `DataError` if missing, empty or of a wrong type."""
    return [
        _checked_text(item, f"step {i} of column {column!r}")
        if isinstance(item, str)
        else _refuse(f"step {i} of column {column!r} is not text, but {type(item).__name__}")
        for i, item in enumerate(_listed(row, column), start=1)
    ]


def read_labels(row: Row, column: str) -> list[float | None]:
    """The labels in `column`, from 0 (wrong) to 1 (right); None of a step without one.  Raises `DataError`."""
    labels = _listed(row, column)
    for i, label in enumerate(labels, start=1):
        if label is not None and not (isinstance(label, bool | int | float) and 0 <= label <= 1):
            raise DataError(
                f"label {i} of column {column!r} is {label!r:.60}, but must be true or false, or a number from 0 (wrong) to 1 "
                "(right), or null"
            )
    if all(label is None for label in labels):
        raise DataError(f"column {column!r} has no label that is not null")
    return [None if label is None else float(label) for label in labels]


def _listed(row: Row, column: str) -> list[Any]:
    value = row.require(column)
    if not isinstance(value, list) or not value:
        raise DataError(f"column {column!r} is not a list with an item per step, but {value!r:.60}")
    return value


def _refuse(reason: str) -> NoReturn:
    raise DataError(reason)


def _checked_text(text: str, what: str) -> str:
    if not text.strip():
        raise DataError(f"{what} is empty")
    if "\0" in text:
        raise DataError(f"{what} has a NUL at character {text.index(chr(0))}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{what} is not text: half of a surrogate pair at character {error.start}") from error
    return text


def _checked_message(message: Message, what: str) -> Message:
    role, content = role_of(message), _content_of(message)
    if not isinstance(role, str) or not role:
        raise DataError(f"{what} has no role (it has: {', '.join(message) or 'nothing'}); give it role and content")
    if "role" not in message and role not in KNOWN_ROLES:
        raise DataError(f"{what} is from {role!r:.60}; known are human, gpt and system, {', '.join(KNOWN_ROLES)}")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise DataError(f"{what} has content that is not text")
        content = "".join(part["text"] for part in content)
    others = {name: value for name, value in message.items() if name not in ("from", "value", *UNLEARNED)}
    if role == "assistant" and any(message.get(name) in (0, False) for name in UNLEARNED):
        others["weight"] = 0
    if not content and any(others.get(name) for name in INSTEAD_OF_TEXT):
        return {**others, "role": role, "content": ""}
    if not isinstance(content, str):
        raise DataError(f"{what} has no text content")
    return {**others, "role": role, "content": _checked_text(content, what)}


def role_of(message: Message) -> Any:
    """The speaker as a role of chat templates, from either style of keys."""
    role = message.get("role") or message.get("from")
    return ROLES.get(role, role) if isinstance(role, str) else role


def _content_of(message: Message) -> Any:
    return message.get("value") if message.get("content") is None else message["content"]


def _is_silent_system(message: Message) -> bool:
    """True for ShareGPT's empty system message."""
    role, content = role_of(message), _content_of(message)
    return role == "system" and isinstance(content, str) and not content.strip()


def split_last_turn(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """(messages before the last assistant turn, that turn); the turn is empty if the messages end with another role."""
    if messages[-1]["role"] != "assistant":
        return messages, []
    if len(messages) == 1:
        raise DataError("the messages hold an assistant's turn and nothing before it")
    return messages[:-1], messages[-1:]


def is_learned(message: Message) -> bool:
    """False if the data set marks the message as one that is not to be learned."""
    return message.get("weight") != 0


def split_turns(messages: list[Message]) -> list[tuple[list[Message], list[Message]]]:
    """(messages before, the turn) for each assistant turn that is to be learned and is not the first message."""
    turns = [i for i, message in enumerate(messages) if i and message["role"] == "assistant" and is_learned(message)]
    return [(messages[:i], messages[i : i + 1]) for i in turns]


def split_dialogue(text: str, what: str) -> list[tuple[str, str]]:
    """`split_turns` for text in which "\\n\\nHuman:" and "\\n\\nAssistant:" alternate.  Raises DataError without a turn."""
    found, end = [], 0
    while (place := text.find(ASSISTANT_MARK, end)) >= 0:
        end = place + len(ASSISTANT_MARK)
        next_turn = text.find(HUMAN_MARK, end)
        answer = text[end : next_turn if next_turn >= 0 else len(text)]
        found.append((text[:end], _checked_text(answer, f"{what}: an assistant's turn")))
        end = len(text) if next_turn < 0 else next_turn
    if not found:
        raise DataError(f"{what} is not a dialogue with a turn after {ASSISTANT_MARK!r}, and there is no prompt column")
    return found


def split_pair(chosen: Value, rejected: Value) -> tuple[Value, Value, Value]:
    """(prompt, chosen, rejected) of two whole dialogues without a prompt column.

    Messages: the prompt is the messages that both begin with.  Text: their common beginning up to its last
    "\\n\\nAssistant:"; what follows may be empty.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        common = os.path.commonprefix([chosen, rejected])
        end = common.rfind(ASSISTANT_MARK) + len(ASSISTANT_MARK)
        if end < len(ASSISTANT_MARK):
            raise DataError(f"no prompt column, and chosen and rejected share no dialogue up to {ASSISTANT_MARK!r}")
        return common[:end], chosen[end:], rejected[end:]
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError("no prompt column, and of chosen and rejected one is text and the other a list of messages")
    shorter = min(chosen, rejected, key=len)
    differing = (i for i, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other)
    # A dialogue that the other one wholly begins with still ends in an answer: its last message.
    num_common = next(differing, len(shorter) - (shorter[-1]["role"] == "assistant"))
    if num_common == 0:
        raise DataError("no prompt column, and the messages of chosen and rejected have no beginning in common")
    for answer in (chosen[num_common:], rejected[num_common:]):
        if answer and answer[0]["role"] in ("user", "system"):
            raise DataError(f"no prompt column, and chosen and rejected part at the {answer[0]['role']}'s turn {num_common + 1}")
    return chosen[:num_common], chosen[num_common:], rejected[num_common:]


def align(prompt: Value, answers: Sequence[Value]) -> tuple[Value, list[Value]]:
    """Return the same example in one form: all text, or all messages, with answers that do not repeat the prompt."""
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        return prompt, list(answers)
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return turns, [_continuing(turns, answer) for answer in answers]


def _continuing(turns: list[Message], answer: Value) -> list[Message]:
    """Return the answer's messages after the prompt's messages; a system message is the prompt's own.  Raises DataError."""
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    for start in (turns, [turn for turn in turns if turn["role"] != "system"]):
        if len(messages) > len(start) and _same(messages[: len(start)], start):
            messages = messages[len(start) :]
            break
    if messages[0]["role"] in ("user", "system"):
        raise DataError(
            f"an answer's messages begin with the {messages[0]['role']}'s turn {messages[0]['content']!r:.60}, and neither "
            "repeat the prompt's nor continue them"
        )
    return messages


def _same(messages: list[Message], others: list[Message]) -> bool:
    """True if roles and texts are equal, apart from surrounding white space."""
    pairs = zip(messages, others, strict=True)
    return all(one["role"] == two["role"] and one["content"].strip() == two["content"].strip() for one, two in pairs)
