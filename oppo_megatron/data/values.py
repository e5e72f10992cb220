from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from oppo_megatron.data.chat_template import REASONING, ChatTemplate, called_functions
from oppo_megatron.data.columns import Message, role_of
from oppo_megatron.data.rows import Row
from oppo_megatron.errors import DataError
from oppo_megatron.nesting import read_json
from oppo_megatron.records import TypedText, field_at, field_names

Value = str | list[Message]
"""Text, or messages with `role` and `content`."""

ASSISTANT_MARK, HUMAN_MARK = "\n\nAssistant:", "\n\nHuman:"
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""True if a completion is wanted, by its label in lower case."""
INSTEAD_OF_TEXT = ("tool_calls", "function_call")
"""Keys of a message that make its text optional."""
UNLEARNED = ("weight", "loss_weight", "loss", "train", "training")
"""Keys that mark a message as not learned, by 0 or false (OpenAI, ShareGPT, Axolotl)."""
KNOWN_ROLES = ("user", "assistant", "system", "tool")


def read_value(row: Row, column: str) -> Value:
    """Read text or messages. Raises DataError if missing, empty or of a wrong type."""
    value = row.require(column)
    if isinstance(value, str):
        return _checked_text(value, f"column {column!r}")
    if isinstance(value, dict) and ("role" in value or "from" in value):
        value = [value]
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        content = _content_of(value[0])  # ShareGPT's system message may be empty
        skipped = role_of(value[0]) == "system" and isinstance(content, str) and not content.strip()
        numbered = list(enumerate(value, start=1))[skipped:]
        return [_checked_message(message, f"message {i} of column {column!r}") for i, message in numbered]
    if value == [] or value is None:
        raise DataError(f"column {column!r} is empty ({value!r})")
    if isinstance(value, dict):
        texts = [name for name in field_names({column: value}) if isinstance(field_at(row.values, name), str)]
        if texts:
            raise DataError(f"column {column!r} is an object: name the key that holds the text, such as {texts[0]}")
    raise DataError(f"column {column!r} is neither text nor a list of messages, but {type(value).__name__}; write it as text")


def read_label(row: Row, column: str) -> bool:
    value = row.require(column)
    wanted = LABELS.get(str(value).strip().lower())
    if wanted is None:
        raise DataError(
            f"column {column!r} is {value!r:.40}, but must say if the completion is wanted (true, 1) or not (false, 0)"
        )
    return wanted


def read_texts(row: Row, column: str) -> list[str]:
    steps = _listed(row, column)
    for i, step in enumerate(steps, start=1):
        if not isinstance(step, str):
            raise DataError(f"step {i} of column {column!r} is not text, but {type(step).__name__}")
        _checked_text(step, f"step {i} of column {column!r}")
    return steps


def read_labels(row: Row, column: str) -> list[float | None]:
    """Labels from 0 (wrong) to 1 (right); None for a step without one."""
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


def _checked_text(text: str, what: str) -> str:
    if isinstance(text, TypedText):
        raise DataError(f"{what} {text.fault}")
    if not text.strip():
        raise DataError(f"{what} is empty")
    return text


def _content_of(message: Message) -> Any:
    return message.get("value") if message.get("content") is None else message["content"]


def _checked_message(message: Message, what: str) -> Message:
    """Normalize to `role` and `content`, with `weight` 0 if not learned."""
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


def is_learned(message: Message) -> bool:
    return message.get("weight") != 0


def split_last_turn(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """(messages before a last assistant turn, that turn or nothing)."""
    if messages[-1]["role"] != "assistant":
        return messages, []
    if len(messages) == 1:
        raise DataError("the messages hold an assistant's turn and nothing before it")
    return messages[:-1], messages[-1:]


def split_turns(messages: list[Message]) -> list[tuple[list[Message], list[Message]]]:
    """(messages before, turn) for each assistant turn to learn, except a first message."""
    turns = [i for i, message in enumerate(messages) if i and message["role"] == "assistant" and is_learned(message)]
    return [(messages[:i], messages[i : i + 1]) for i in turns]


def is_dialogue(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("Human:") and ASSISTANT_MARK in value


def split_dialogue(text: str, what: str) -> list[tuple[str, str]]:
    r"""`split_turns` for text with "\n\nHuman:" and "\n\nAssistant:" in turn."""
    found, end = [], 0
    while (place := text.find(ASSISTANT_MARK, end)) >= 0:
        start = place + len(ASSISTANT_MARK)
        next_turn = text.find(HUMAN_MARK, start)
        end = next_turn if next_turn >= 0 else len(text)
        found.append((text[:start], _checked_text(text[start:end], f"{what}: an assistant's turn")))
    if not found:
        raise DataError(f"{what} is not a dialogue with a turn after {ASSISTANT_MARK!r}, and no column holds the prompt")
    return found


def split_pair(chosen: Value, rejected: Value) -> tuple[Value, Value, Value]:
    r"""(prompt, chosen, rejected) of two dialogues: common messages, or common text up to its last "\n\nAssistant:"."""
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
    # If one dialogue is a prefix of the other, its last message is still its answer.
    num_common = next(differing, len(shorter) - (shorter[-1]["role"] == "assistant"))
    if num_common == 0:
        raise DataError("no prompt column, and the messages of chosen and rejected have no beginning in common")
    for answer in (chosen[num_common:], rejected[num_common:]):
        if answer and answer[0]["role"] in ("user", "system"):
            raise DataError(f"no prompt column, and chosen and rejected part at the {answer[0]['role']}'s turn {num_common + 1}")
    return chosen[:num_common], chosen[num_common:], rejected[num_common:]


def align(prompt: Value, answers: Sequence[Value]) -> tuple[Value, list[Value]]:
    """Convert to all text or all messages, without the prompt in answers."""
    if isinstance(prompt, str) and all(isinstance(answer, str) for answer in answers):
        if ASSISTANT_MARK in prompt and all(
            isinstance(answer, str) and len(answer) > len(prompt) and answer.startswith(prompt) for answer in answers
        ):
            return prompt, [answer[len(prompt) :] for answer in answers]
        return prompt, list(answers)
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return turns, [_continuing(turns, answer) for answer in answers]


def _continuing(turns: list[Message], answer: Value) -> list[Message]:
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    for start in (turns, [turn for turn in turns if turn["role"] != "system"]):
        if len(messages) > len(start) and _said(messages[: len(start)]) == _said(start):
            messages = messages[len(start) :]
            break
    if messages[0]["role"] in ("user", "system"):
        raise DataError(
            f"an answer's messages begin with the {messages[0]['role']}'s turn {messages[0]['content']!r:.60}, and neither "
            "repeat the prompt's nor continue them"
        )
    return messages


def _said(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"].strip()) for message in messages]


FOR_TEMPLATES = ("tools", "documents")
"""Columns made for chat templates; a note reports any that the template does not read."""
ARGUMENTS = "chat_template_kwargs"
"""TRL's column of template arguments per row."""
LEARNED = {"content", "tool_calls", "function_call", *REASONING}
"""Keys of an answer's message that are learned."""
THOUGHTS = "; by tokenizer.template_arguments prompts are for answers with reasoning (enable_thinking: true) or without (false)"
SHOWN = 40


class TemplateMismatch(DataError):
    """A valid row that this chat template cannot render."""


class Conversations:
    """`used`: columns of prompt and answer, hidden from the template."""

    def __init__(self, chat: ChatTemplate, used: Collection[str | None], note: Callable[[str], None]):
        self._chat, self._used, self._note = chat, used, note
        self._noted: set[tuple[str, str]] = set()

    def texts(self, row: Row, prompt: Value, answers: Sequence[Value]) -> tuple[str, list[str]]:
        """Return prompt and answers as text. Raises DataError (TemplateMismatch if part of an answer is hidden)."""
        if isinstance(prompt, str):
            return prompt, [answer for answer in answers if isinstance(answer, str)]
        variables = self.variables(row.values, row.file)
        head = self._chat.render(prompt, variables=variables)
        self._note_lost(row, prompt, head)
        tails = []
        for answer in answers:
            assert isinstance(answer, list), "align gives prompt and answers one form"
            whole = self._chat.render([*prompt, *answer], generation_prompt=False, variables=variables)
            start = len(_squeezed(head)) if whole.startswith(head) else 0
            if lost := [name for name in _lost(answer[-1], _squeezed(whole), start) if name in LEARNED]:
                raise TemplateMismatch(
                    f"the chat template leaves out a part of the answer's {' and '.join(lost)}, so that it would not be learned "
                    "(templates of reasoning models drop the text before </think>)"
                )
            if not whole.startswith(head):
                place, reads = len(os.path.commonprefix([head, whole])), self._chat.reads(bool(variables.get("tools")))
                raise TemplateMismatch(
                    "the chat template does not render the answer as a continuation of the prompt: the prompt ends with "
                    f"{head[place : place + SHOWN]!r}, but the whole conversation has {whole[place : place + SHOWN]!r}"
                    + (THOUGHTS if "enable_thinking" in reads else "")
                )
            self._note_lost(row, answer, whole)
            tails.append(whole[len(head) :])
        return head, tails

    def variables(self, values: Mapping[str, Any], file: str) -> dict[str, Any]:
        """The columns that the template reads, and the row's arguments."""
        columns = {name: value for name, value in values.items() if value is not None and name not in self._used}
        own = _read_json(columns.pop(ARGUMENTS, None) or {}, ARGUMENTS, dict)
        for name in FOR_TEMPLATES:
            if name in columns:
                try:
                    columns[name] = _read_json(columns[name], name, list)
                except DataError:
                    if name in self._chat.reads(with_tools=name == "tools"):
                        raise
        given = {**columns, **own}
        reads = self._chat.reads(with_tools=bool(given.get("tools")))
        for name in given:
            if name in reads:
                self._note_once("read", name, f"{file}: column {name!r} is given to the chat template")
            elif (name in FOR_TEMPLATES and given[name]) or name in own:
                lost = f"{file}: {name!r} is not shown to the model: the chat template does not read it"
                self._note_once("unread", name, f"{lost}; set tokenizer.chat_template to one that does")
        return {name: value for name, value in given.items() if name in reads and value not in ([], {})}

    def _note_lost(self, row: Row, messages: Sequence[Message], text: str) -> None:
        squeezed = _squeezed(text)
        for message in messages:
            for name in _lost(message, squeezed):
                what = f"text of {message['role']!r} messages" if name == "content" else f"{name!r} of messages"
                lost = f"{what} is not shown to the model: the chat template leaves it out (first in {row.file}:{row.line})"
                self._note_once(message["role"], name, lost)

    def _note_once(self, kind: str, name: str, line: str) -> None:
        if (kind, name) not in self._noted:
            self._noted.add((kind, name))
            self._note(line)


def _read_json(value: Any, name: str, kind: type) -> Any:
    if isinstance(value, str):
        try:
            value = read_json(value) if value.strip() else None
        except ValueError as error:
            raise DataError(f"column {name!r} is text, but not JSON ({error})") from error
        value = kind() if value is None else value
    if not isinstance(value, kind):
        raise DataError(f"column {name!r} is not a {'list' if kind is list else 'mapping'}, but {type(value).__name__}")
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _lost(message: Message, squeezed: str, start: int = 0) -> Iterator[str]:
    """Yield keys that the text does not show, ignoring text before `start`."""

    def shows(text: str) -> bool:
        forms = (_squeezed(text), _squeezed(json.dumps(text)[1:-1]))
        return any((place := squeezed.rfind(form)) >= 0 and place + len(form) > start for form in forms)

    for name, value in message.items():
        if name == "role" or not value:
            continue
        if isinstance(value, str) and not shows(value):
            yield name
        elif name in ("tool_calls", "function_call") and not all(map(shows, called_functions(value))):
            yield name
