from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oppo_megatron.config.data import DataConfig, RowsConfig
from oppo_megatron.data.columns import Table, is_filled
from oppo_megatron.data.formats import Layout, Wanted, recognise
from oppo_megatron.data.rows import Row, RowProblems, read_rows
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.data.values import (
    ASSISTANT_MARK,
    HUMAN_MARK,
    Conversations,
    TemplateMismatch,
    Value,
    align,
    is_learned,
    read_label,
    read_labels,
    read_texts,
    read_value,
    split_dialogue,
    split_last_turn,
    split_pair,
    split_turns,
)
from oppo_megatron.errors import DataError

Answered = tuple[Value, Sequence[Value]]
PARTS = {
    "prompt": ("prompt",),
    "completion": ("prompt", "completion"),
    "pair": ("prompt", "chosen", "rejected"),
    "steps": ("prompt", "completion"),
}
"""Texts of an example for each kind of training."""


@dataclass(frozen=True, slots=True)
class Example:
    """`answers`: (), (completion,) or (chosen, rejected). `fields`: other columns."""

    row: Row
    prompt: str
    answers: tuple[str, ...]
    fields: dict[str, Any]
    chat: bool


def read_prompts(config: RowsConfig, tokenizer: Tokenizer, problems: RowProblems) -> list[Example]:
    """Prompts without a trailing assistant turn."""
    rows = read_rows(config, problems, ["prompt"])
    layout = recognise(config, rows, "prompt")
    return _render(rows, lambda row: [(_prompt(row, layout), ())], layout, "prompt", config, tokenizer, problems)


def read_completions(config: DataConfig, tokenizer: Tokenizer, problems: RowProblems) -> list[Example]:
    """Prompts with a completion: its column, or the turns of `config.turns`."""
    return _completions(read_rows(config, problems, ["prompt", "completion"]), config, tokenizer, problems)


def read_pairs(config: DataConfig, tokenizer: Tokenizer, problems: RowProblems) -> list[Example]:
    examples = _pairs(read_rows(config, problems, ["prompt", "completion"]), config, tokenizer, problems)
    same = sum(example.answers[0] == example.answers[1] for example in examples)
    if same:
        problems.quarantine.note(f"{same} of {len(examples)} pairs have the same text as chosen and rejected: they teach nothing")
    return examples


def read_marked(config: DataConfig, tokenizer: Tokenizer, problems: RowProblems) -> list[tuple[Example, bool]]:
    """Prompts with a completion and its label; a pair gives two."""
    rows = read_rows(config, problems, ["prompt", "completion"])
    table = Table(rows)
    if table.find("label", config.columns) is None and table.find("chosen", config.columns) is not None:
        return [
            (replace(pair, answers=(answer,)), wanted)
            for pair in _pairs(rows, config, tokenizer, problems)
            if is_unequal(pair, pair.answers, config, problems)
            for answer, wanted in zip(pair.answers, (True, False), strict=True)
        ]
    column = table.require("label", config.columns)
    marked: list[tuple[Example, bool]] = []
    for example in _completions(rows, config.model_copy(update={"turns": "last"}), tokenizer, problems, [column]):
        try:
            marked.append((example, read_label(example.row, column)))
        except DataError as refusal:
            problems.report(example.row.file, example.row.line, str(refusal), config.bad_rows, once=True)
    return marked


def is_unequal(
    example: Example, answers: Sequence[str | list[int]], config: DataConfig, problems: RowProblems, when: str = ""
) -> bool:
    """True if a pair's answers differ; else refuse it. `when` extends the reason."""
    if answers[0] != answers[1]:
        return True
    reason = f"chosen and rejected are the same{when}: such a pair prefers nothing"
    problems.report(example.row.file, example.row.line, reason, config.bad_rows, once=True)
    return False


def read_steps(
    config: DataConfig, tokenizer: Tokenizer, problems: RowProblems, separator: str
) -> list[tuple[Example, list[float | None]]]:
    """Prompts with an answer (joined steps) and the steps' labels (None: not labelled)."""
    rows = read_rows(config, problems, ["prompt", "completion"])
    steps, labels = (Table(rows).require(part, config.columns) for part in ("completions", "labels"))
    layout = recognise(config, rows, "steps", [steps, labels])
    problems.quarantine.note(f"{rows[0].file}: steps from {steps!r}, their labels from {labels!r}")

    def joined(row: Row) -> Sequence[Answered]:
        texts, num_labels = read_texts(row, steps), len(read_labels(row, labels))
        if len(texts) != num_labels:
            raise DataError(f"{len(texts)} steps in column {steps!r}, but {num_labels} labels in {labels!r}")
        return [(_prompt(row, layout), [separator.join(texts)])]

    examples = _render(rows, joined, layout, "steps", config, tokenizer, problems)
    return [(example, read_labels(example.row, labels)) for example in examples]


def _completions(
    rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer, problems: RowProblems, used: Sequence[str] = ()
) -> list[Example]:
    layout = recognise(config, rows, "completion", used)

    def with_completion(row: Row) -> Sequence[Answered]:
        if layout.prompt is None or layout.completion is None:
            return _turns(row, layout, config.turns)
        return [(_prompt(row, layout), [read_value(row, layout.completion)])]

    return _render(rows, with_completion, layout, "completion", config, tokenizer, problems)


def _pairs(rows: Sequence[Row], config: DataConfig, tokenizer: Tokenizer, problems: RowProblems) -> list[Example]:
    layout = recognise(config, rows, "pair")

    def with_pair(row: Row) -> Sequence[Answered]:
        if layout.prompt is None:
            prompt, *answers = _parted(row, layout)
            for name, answer in zip(("chosen", "rejected"), answers, strict=True):
                if not answer or (isinstance(answer, str) and not answer.strip()):
                    raise DataError(f"the {name} answer after the common dialogue is empty")
            return [(prompt, answers)]
        assert layout.chosen and layout.rejected, "a pair has both"
        return [(_prompt(row, layout), [read_value(row, layout.chosen), read_value(row, layout.rejected)])]

    examples = _render(rows, with_pair, layout, "pair", config, tokenizer, problems)
    longer = sum(any(HUMAN_MARK in answer for answer in example.answers) for example in examples)
    if longer and layout.format == "hh":
        problems.quarantine.note(
            f"{longer} of {len(examples)} pairs part before their last turn: their answers hold all turns from there on"
        )
    return examples


def _prompt(row: Row, layout: Layout) -> Value:
    if layout.prompt is None:
        return _parted(row, layout)[0]
    value = _said(row, layout, layout.prompt)
    return value if isinstance(value, str) else split_last_turn(value)[0]


def _parted(row: Row, layout: Layout) -> tuple[Value, Value, Value]:
    assert layout.chosen and layout.rejected, "without a prompt there are both"
    prompt, chosen, rejected = split_pair(read_value(row, layout.chosen), read_value(row, layout.rejected))
    return _with_system(row, layout, prompt), chosen, rejected


def _said(row: Row, layout: Layout, column: str) -> Value:
    """A column's text with its addition, or messages after the system message."""
    value = read_value(row, column)
    if isinstance(value, str) and column == layout.prompt:
        added = row.get(layout.added)
        if added is not None and not isinstance(added, str):
            raise DataError(f"column {layout.added!r} is not text, but {type(added).__name__}")
        value = f"{value}\n\n{added}" if added and added.strip() else value
        value = [{"role": "user", "content": value}] if layout.chat else value
    return _with_system(row, layout, value)


def _with_system(row: Row, layout: Layout, value: Value) -> Value:
    system = row.get(layout.system)
    if isinstance(value, str) or value[0]["role"] == "system" or not is_filled(system):
        return value
    if not isinstance(system, str):
        raise DataError(f"column {layout.system!r} is not text, but {type(system).__name__}")
    return [{"role": "system", "content": system}, *value]


def _turns(row: Row, layout: Layout, turns: str) -> Sequence[Answered]:
    column = layout.prompt or layout.chosen
    assert column is not None, "rows without a prompt have dialogues"
    no_completion = f"no completion: column {column!r} does not end with an assistant's turn"
    value = _said(row, layout, column)
    if isinstance(value, str):
        if layout.format != "hh":
            raise DataError(no_completion)
        said = [(before, (turn,)) for before, turn in split_dialogue(value, f"column {column!r}")]
        if turns == "last" and value.rfind(HUMAN_MARK) > value.rfind(ASSISTANT_MARK):
            raise DataError(no_completion)
        return said if turns == "all" else said[-1:]
    if turns == "all" and (every := split_turns(value)):
        return [(before, (turn,)) for before, turn in every]
    before, turn = split_last_turn(value)
    if not turn:
        raise DataError(no_completion)
    if not is_learned(turn[0]):
        raise DataError(f"no completion: column {column!r} marks the assistant's turn as not to be learned (weight 0)")
    return [(before, (turn,))]


def _render(
    rows: Sequence[Row], extract: Callable[[Row], Sequence[Answered]], layout: Layout, wanted: Wanted, config: RowsConfig,
    tokenizer: Tokenizer, problems: RowProblems,
) -> list[Example]:  # fmt: skip
    examples: list[Example] = []
    turns = getattr(config, "turns", "last")
    answer_template = getattr(config, "completion_template", "{completion}")
    problems.quarantine.note(f"{rows[0].file}: {layout.describe(wanted, turns)}")
    used = (layout.prompt, layout.system, layout.completion, layout.chosen, layout.rejected)
    conversations = Conversations(tokenizer.chat, used, problems.quarantine.note)
    for number, row in enumerate(rows):
        problems.quarantine.progress(f"{row.file}: {number} of {len(rows)} rows rendered")
        try:
            aligned = [align(*answered) for answered in extract(row)]
            texts = [(*conversations.texts(row, prompt, answers), not isinstance(prompt, str)) for prompt, answers in aligned]
        except DataError as refusal:
            sound = isinstance(refusal, TemplateMismatch)
            problems.report(row.file, row.line, str(refusal), config.bad_rows, once=True, sound=sound)
            continue
        fields = {name: value for name, value in row.values.items() if name != layout.prompt}
        for prompt, answers, chat in texts:
            prompt = config.prompt_template.replace("{prompt}", prompt)
            filled = tuple(answer_template.replace("{completion}", answer) for answer in answers)
            examples.append(Example(row, prompt, filled, fields, chat))
    chats = sum(example.chat for example in examples)
    if layout.prompt and 0 < chats < len(examples):
        problems.quarantine.note(
            f"{examples[0].row.file}: {chats} of {len(examples)} prompts are chat messages, the others text that no chat "
            f"template is put around; data.format=messages and data.columns.prompt={layout.prompt} make each a user's turn"
        )
    if examples and not problems.quarantine.first:
        problems.quarantine.first = dict(zip(PARTS[wanted], (examples[0].prompt, *examples[0].answers), strict=True))
    return examples
