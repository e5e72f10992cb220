"""Sections for tokenizers, data sets and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr
from typing_extensions import Self

from oppo_megatron.config.base import Section, Unit

STEP_SEPARATOR = "\n"


Part = Literal["prompt", "chosen", "rejected", "completion", "label", "completions", "labels"]


class TokenizerConfig(Section):
    """A Hugging Face tokenizer directory, or a sentencepiece `.model` file."""

    path: Path = Field(..., description="Hugging Face tokenizer directory, or a sentencepiece `.model` file")
    chat_template: str | None = Field(None, description="Jinja template for `messages`; default: the tokenizer's own")
    template_arguments: dict[str, Any] = Field(
        {},
        description="variables for the chat template, such as `{enable_thinking: false}`; a row's column of that "
        "name comes first",
    )
    add_bos: bool | None = Field(
        None,
        description="begin each prompt with BOS, unless its text or template does; null: if the tokenizer "
        "itself does (sentencepiece does not)",
    )

    _date: datetime | None = PrivateAttr(default=None)

    @property
    def date(self) -> datetime | None:
        """Date for templates: of the run's first start."""
        return self._date

    def dated(self, date: datetime | None) -> Self:
        copy = self.model_copy()
        copy._date = date
        return copy


class FilesConfig(Section):
    """Files of a list in `data.path`, with a weight."""

    path: Path = Field(..., description="file, pattern or folder, as in `data.path`")
    weight: Annotated[float, Unit("times per epoch")] = Field(
        1.0, gt=0, le=1000, description="how often an epoch has each row; 0.5: one half of the rows, the next the other"
    )


class RowsConfig(Section):
    """Files of rows, and how they are read (docs/data.md)."""

    path: Path | list[Path | FilesConfig] = Field(
        ...,
        description="JSONL, JSON, CSV, TSV or Parquet, also compressed: a file, pattern or folder; a folder of "
        "`save_to_disk`; or a list of these, also with weights: `[a.jsonl, {path: b.jsonl, weight: 2}]`",
    )
    format: Literal["auto", "columns", "alpaca", "sharegpt", "messages", "hh"] = Field(
        "auto",
        description="layout of a row: detected, a column for each part, Alpaca's instruction and input, "
        "ShareGPT's conversations, lists of role and content, Human/Assistant dialogues in chosen and rejected",
    )
    columns: dict[Part, str] = Field(
        {},
        description="columns by their part, for unknown names (`a.b` is key `b` of the objects in column `a`): prompt; chosen "
        "and rejected, the better and the worse answer (`oppo rm`, `oppo dpo`); completion, the answer to learn or to judge "
        "(`oppo sft`, `oppo dpo`); label, whether it is wanted: true or false, 1 or 0 (`oppo dpo`); completions, the steps of "
        "the answer, a list of texts, and labels, for each step whether it is right, or a number from 0 to 1 (`oppo rm`)",
    )
    prompt_template: str = Field("{prompt}", description="text around each prompt; `{prompt}` is its place")
    max_rows: int | None = Field(None, ge=1, description="use at most this many rows, from the start of the data")
    bad_rows: Literal["error", "quarantine"] = Field(
        "error", description="a row that is not JSON, lacks a column or has no text: end the run, or set the row aside"
    )
    long_rows: Literal["error", "truncate", "quarantine"] = Field(
        "error",
        description="a longer prompt ends the run, is cut to its end, or is set aside; in supervised "
        "training also a row of more than `max_tokens`, by default set aside",
    )
    shuffle: bool = Field(True, description="a new order each epoch, from the seed; false: the file's order")

    @property
    def sources(self) -> list[FilesConfig]:
        listed = self.path if isinstance(self.path, list) else [self.path]
        return [each if isinstance(each, FilesConfig) else FilesConfig(path=each) for each in listed]

    def rules(self, name: str, templates: Sequence[str]) -> Iterator[str]:
        """`templates` in use: prompt, completion."""
        if isinstance(self.path, list) and not self.path:
            yield f"{name}.path is an empty list; name at least one file"
        for number, source in enumerate(self.sources):
            if name != "data" and source.weight != 1:
                yield f"{name}.path.{number}.weight is {source.weight:g}, but each held-out row is measured once; remove it"
        for part in templates:
            template = getattr(self, f"{part}_template", self.prompt_template)
            if "{" + part + "}" not in template:
                yield f"{name}.{part}_template is {template!r}, but must contain `{{{part}}}` at the place of the text; add it"


class PromptDataConfig(RowsConfig):
    """Files of prompts; other columns of their rows are for rewards."""

    columns: dict[Literal["prompt"], str] = Field(  # type: ignore[assignment]
        {},
        description="column of the prompt if it has an unknown name, as in `{prompt: q.text}` (key `text` of the objects in `q`)",
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longest prompt")


class DataConfig(RowsConfig):
    """Files of rows with answers, as `RowsConfig`."""

    turns: Literal["last", "all"] = Field("last", description="turns to learn: the last, or each as a row (`oppo sft`)")
    completion_template: str = Field("{completion}", description="text around each completion or answer")


KNOWN_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "instruction", "problem", "query", "messages", "conversations", "conversation"),
    "completion": ("completion", "response", "output", "solution", "answer"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "label": ("label",),
    "completions": ("completions", "steps"),
    "labels": ("labels",),
}
