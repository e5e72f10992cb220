"""Sections for tokenizers, data sets and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import regex
from pydantic import Field, field_validator

from oppo_megatron.config.base import Section, Unit
from oppo_megatron.config.remote import IsolationConfig, RemoteRewardConfig

STEP_SEPARATOR = "\n"


class TokenizerConfig(Section):
    """A Hugging Face tokenizer directory, or a sentencepiece `.model` file."""

    path: Path = Field(..., description="Hugging Face tokenizer directory, or a sentencepiece `.model` file")
    chat_template: str | None = Field(
        None, description="Jinja template for OpenAI-style `messages`; default: the tokenizer's own"
    )
    template_arguments: dict[str, Any] = Field(
        {},
        description="variables for the chat template, such as `{enable_thinking: false}`; a row's column of that name goes first",
    )
    date: datetime | None = Field(
        None,
        description="the date that a chat template prints as today's; null: when the first run began in `run_dir`, kept there",
    )
    add_bos: bool | None = Field(
        None,
        description="begin each prompt with BOS, unless its text or template already does; null: if the tokenizer itself does "
        "so (a sentencepiece model does not)",
    )


class PromptColumnsConfig(Section):
    """The columns of a row by their part; `a.b` is key `b` of the objects in column `a`.

    A null part is found by the known names (GSM8K's, TRL's, OpenAI's).
    """

    prompt: str | None = Field(None, description="the prompt: text, or a list of messages")


class ColumnsConfig(PromptColumnsConfig):
    """The columns of a row by their part, answers among them."""

    chosen: str | None = Field(
        None, description="the better answer (`oppo rm`, `oppo dpo`, `oppo kto`); of dialogues, with the prompt before it"
    )
    rejected: str | None = Field(None, description="the worse answer, as `chosen`")
    completion: str | None = Field(None, description="the answer to learn or to judge (`oppo sft`, `oppo kto`)")
    label: str | None = Field(None, description="whether the answer is wanted: true or false, 1 or 0 (`oppo kto`)")
    completions: str | None = Field(None, description="the steps of the answer: a list of texts (`oppo prm`)")
    labels: str | None = Field(
        None, description="for each step whether it is right: true or false, or a number from 0 to 1 (`oppo prm`)"
    )


class RowsConfig(Section):
    """Files of rows (JSONL, JSON, CSV, Parquet, also compressed), and how they are read (docs/data.md)."""

    path: Path | list[Path] = Field(
        ...,
        description="JSONL, JSON, CSV, TSV or Parquet, also compressed; a pattern, a list or a folder of such files; or a "
        "folder of `save_to_disk`",
    )
    format: Literal["auto", "columns", "alpaca", "sharegpt", "messages", "hh"] = Field(
        "auto",
        description="layout of prompt and answers in a row: detected from the columns, a column each, Alpaca's "
        "instruction and input, ShareGPT's conversations, lists of role and content, Human/Assistant dialogues in "
        "chosen and rejected",
    )
    columns: PromptColumnsConfig = PromptColumnsConfig()
    prompt_template: str = Field("{prompt}", description="text around each prompt; `{prompt}` stands for it")
    max_rows: int | None = Field(None, ge=1, description="use at most this many rows, from the start of the data")
    bad_rows: Literal["error", "quarantine"] = Field(
        "error", description="a row that is not JSON, lacks a column or has no text: end the run, or set the row aside"
    )
    long_rows: Literal["error", "truncate", "quarantine"] = Field(
        "error",
        description="a longer prompt ends the run, is cut to its end, or is set aside; for supervised training "
        "the same for a row of more than `max_tokens`, by default `quarantine`",
    )
    shuffle: bool = Field(True, description="a new order each epoch, from the seed; false: the file's order")

    def rules(self, name: str, templates: Sequence[str]) -> Iterator[str]:
        """`templates` are those in use: prompt, completion."""
        if isinstance(self.path, list) and not self.path:
            yield f"{name}.path is an empty list; name at least one file"
        for part in templates:
            template = getattr(self, f"{part}_template", self.prompt_template)
            if "{" + part + "}" not in template:
                yield f"{name}.{part}_template is {template!r}, but must contain `{{{part}}}` where the text goes; add it"


class PromptDataConfig(RowsConfig):
    """Files of prompts, as `RowsConfig`; what else is in their rows is for rewards."""

    max_prompt_tokens: int = Field(1024, ge=1, description="longest prompt")


class DataConfig(RowsConfig):
    """Files of rows with answers, as `RowsConfig`."""

    columns: ColumnsConfig = ColumnsConfig()
    turns: Literal["last", "all"] = Field(
        "last",
        description="the assistant's turns of a dialogue to learn: the last, or each one as a row of its own (`oppo sft`)",
    )
    completion_template: str = Field(
        "{completion}", description="text around each completion, chosen or rejected answer"
    )


RuleName = Literal["arithmetic", "gsm8k", "gsm8k_first", "math", "multiple_choice", "format", "length", "code"]

RULE_WALL_S = {"math": 5.0, "code": 10.0}
"""The rules that run in processes of their own, and the time limit of a response."""


class RewardPart(Section):
    """One summand of the reward: `weight` times the number that `kind` gives for a finished response.

    kind: `model` the reward model's scalar; `process` the scores that a process reward model gives to the steps of the
    response, each the probability that the step is right (docs/process_rewards.md); `verifier` a rule by `name`, most of
    which compare the response with column `answer`; `python` a user's function `entry_point` = `package.module:function` or
    `file.py:function`, called with (prompt, response, fields); `http` a reward service at `url` (docs/rewards.md).
    """

    kind: Literal["model", "process", "verifier", "python", "http"] = Field(
        ..., description="source of the number: the reward model, a process reward model, a rule, a function, a service"
    )
    weight: Annotated[float, Unit("factor")] = Field(1.0, description="factor of this part in the sum")
    name: RuleName | None = Field(None, description="the rule (verifier)")
    answer: str = Field(
        "answer",
        description="column that holds the expected answer, for rule `code` the tests; `a.b` is key `b` of the objects in column "
        "`a` (verifier)",
    )
    lenient: bool = Field(
        False,
        description="accept less: the last number in the response if no answer is marked (rule `gsm8k`); a match of the pattern "
        "anywhere in the response (rule `format`); score the share of passed tests instead of 1 if all passed (rule `code`)",
    )
    pattern: str | None = Field(
        None, description="regular expression, of which `.` matches a line's end, too (rule `format`)"
    )
    buffer_tokens: int | None = Field(
        None,
        ge=1,
        description="the penalty grows from 0 to -1 over the last tokens before `max_tokens` (rule `length`)",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="length from which the penalty is -1; null: `rollout.max_response_tokens` (rule `length`)"
    )
    processes: Annotated[int, Unit("processes")] = Field(
        4, ge=1, description="responses that are checked at once (rules `math` and `code`)"
    )
    entry_point: str | None = Field(None, description="`package.module:function` or `folder/file.py:function` (python)")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments for the entry point")
    isolate: bool | IsolationConfig = Field(
        False,
        description="call it in its own process with these limits; true: with the default limits (python; the rules "
        "`math` and `code` always have processes, by default with `wall_s` 5 and 10)",
    )
    url: str | None = Field(None, description="address to which responses are posted: `http://HOST:PORT/score` (http)")
    token_env: str | None = Field(
        None, description="environment variable with the service's bearer token; null: none is sent (http)"
    )
    remote: RemoteRewardConfig = RemoteRewardConfig()
    step_rewards: Literal["last", "min", "sum", "potential"] = Field(
        "last",
        description="reward made from the steps' scores p_k: last or min: the last or the lowest score, at the response's last "
        "token; sum: p_k at the end of step k; potential: p_k - p_(k-1) there, which sums to the last score (process)",
    )
    separator: str = Field(
        STEP_SEPARATOR, min_length=1, description="text between two steps, as the model was trained with (process)"
    )

    @property
    def reads_model(self) -> bool:
        """True if the run's reward model gives the number."""
        return self.kind in ("model", "process")

    @field_validator("pattern")
    @classmethod
    def _readable(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            compile_pattern(pattern)
        return pattern

    @property
    def isolation(self) -> IsolationConfig | None:
        """Limits of its own process, if it has one."""
        if isinstance(self.isolate, IsolationConfig):
            return self.isolate
        if self.kind == "verifier":
            wall_s = RULE_WALL_S.get(self.name or "")
            return None if wall_s is None else IsolationConfig(wall_s=wall_s)
        return IsolationConfig() if self.isolate else None


def compile_pattern(pattern: str) -> regex.Pattern[str]:
    """Raises ValueError if it is not a regular expression."""
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ValueError(f"a regular expression ({error})") from error


KNOWN_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "instruction", "problem", "query", "messages", "conversations", "conversation"),
    "completion": ("completion", "response", "output", "solution", "answer"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "label": ("label",),
    "completions": ("completions", "steps"),
    "labels": ("labels",),
}
