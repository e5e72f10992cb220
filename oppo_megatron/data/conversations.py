from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from oppo_megatron.data.chat_template import REASONING, ChatTemplate, called_functions
from oppo_megatron.data.columns import Message
from oppo_megatron.data.rows import Row
from oppo_megatron.data.values import Value
from oppo_megatron.errors import DataError
from oppo_megatron.nesting import read_json

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
