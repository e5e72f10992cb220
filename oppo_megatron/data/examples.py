"""From rows to texts: a prompt and its answers, rendered by the templates or the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oppo_megatron.config.data import DataConfig
from oppo_megatron.data.columns import (
    Value,
    align,
    find_column,
    read_value,
    require_column,
    split_last_turn,
    split_pair,
)
from oppo_megatron.data.rows import Row, RowProblems, read_rows
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.errors import DataError

Extract = Callable[[Row], tuple[Value, Sequence[Value]]]


@dataclass(frozen=True, slots=True)
class Example:
    """One row as text.  `answers` is empty, (completion,) or (chosen, rejected); `fields` are the other columns."""

    row: Row
    prompt: str
    answers: tuple[str, ...]
    fields: dict[str, Any]


def read_prompts(config: DataConfig, tokenizer: Tokenizer, problems: RowProblems) -> list[Example]:
    """Prompts without answers.  A trailing assistant turn of a message list is not part of the prompt."""
    rows = read_rows(config, problems, ["prompt"])
    column = find_column("prompt", config.columns, rows)
    has_pair = all(find_column(part, config.columns, rows) for part in ("chosen", "rejected"))
    if column is None and has_pair:
        extract = _pair_extractor(config, rows)
        return _render(rows, lambda row: (extract(row)[0], ()), None, config, tokenizer, problems)
    name = require_column("prompt", config.columns, rows)

    def prompt_only(row: Row) -> tuple[Value, Sequence[Value]]:
        value = read_value(row, name)
        return (value if isinstance(value, str) else split_last_turn(value)[0]), ()

    return _render(rows, prompt_only, name, config, tokenizer, problems)


def read_completions(config: DataConfig, tokenizer: Tokenizer, problems: RowProblems) -> list[Example]:
    """Prompts with one completion: its column, or the last assistant turn of a message list."""
    rows = read_rows(config, problems, ["prompt", "completion"])
    prompt = require_column("prompt", config.columns, rows)
    completion = find_column("completion", config.columns, rows)
    if completion is None and not any(isinstance(row.values.get(prompt), list) for row in rows):
        require_column("completion", config.columns, rows)

    def with_completion(row: Row) -> tuple[Value, Sequence[Value]]:
        value = read_value(row, prompt)
        if completion is not None:
            return value, (read_value(row, completion),)
        before, turn = (value, None) if isinstance(value, str) else split_last_turn(value)
        if not turn:
            raise DataError(f"no completion: column {prompt!r} does not end with an assistant's turn")
        return before, (turn,)

    return _render(rows, with_completion, prompt, config, tokenizer, problems)


def read_pairs(config: DataConfig, tokenizer: Tokenizer, problems: RowProblems) -> list[Example]:
    """Prompts with a chosen and a rejected answer."""
    rows = read_rows(config, problems, ["prompt", "completion"])
    column = find_column("prompt", config.columns, rows)
    return _render(rows, _pair_extractor(config, rows), column, config, tokenizer, problems)


def _pair_extractor(config: DataConfig, rows: Sequence[Row]) -> Extract:
    prompt = find_column("prompt", config.columns, rows)
    chosen = require_column("chosen", config.columns, rows)
    rejected = require_column("rejected", config.columns, rows)

    def pair(row: Row) -> tuple[Value, Sequence[Value]]:
        answers = read_value(row, chosen), read_value(row, rejected)
        if prompt is not None:
            return read_value(row, prompt), answers
        common, *rests = split_pair(*answers)
        return common, rests

    return pair


def _render(
    rows: Sequence[Row],
    extract: Extract,
    prompt_column: str | None,
    config: DataConfig,
    tokenizer: Tokenizer,
    problems: RowProblems,
) -> list[Example]:
    examples: list[Example] = []
    for row in rows:
        try:
            prompt, answers = _texts(*align(*extract(row)), tokenizer)
        except DataError as refusal:
            problems.report(row.file, row.line, str(refusal), config.bad_rows)
            continue
        examples.append(
            Example(
                row,
                config.prompt_template.replace("{prompt}", prompt),
                tuple(config.completion_template.replace("{completion}", answer) for answer in answers),
                {name: value for name, value in row.values.items() if name != prompt_column},
            )
        )
    return examples


def _texts(prompt: Value, answers: Sequence[Value], tokenizer: Tokenizer) -> tuple[str, list[str]]:
    if isinstance(prompt, str):
        return prompt, [answer for answer in answers if isinstance(answer, str)]
    head = tokenizer.render_chat(prompt)
    tails = []
    for answer in answers:
        assert isinstance(answer, list), "align gives prompt and answers one form"
        whole = tokenizer.render_chat([*prompt, *answer], generation_prompt=False)
        if not whole.startswith(head):
            raise DataError("the chat template does not render the answer as a continuation of the prompt")
        tails.append(whole[len(head) :])
    return head, tails
