"""Sections for tokenizers, data sets and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from oppo_megatron.config.base import Section


class TokenizerConfig(Section):
    """A Hugging Face tokenizer directory, or a sentencepiece `.model` file."""

    path: Path
    chat_template: str | None = Field(
        None, description="Jinja template for OpenAI-style `messages`; default: the tokenizer's own"
    )


class ColumnsConfig(Section):
    """Which column of a row plays which part.  A null part is found by the known names (GSM8K's, TRL's, OpenAI's)."""

    prompt: str | None = None
    completion: str | None = None
    chosen: str | None = None
    rejected: str | None = None


class DataConfig(Section):
    """A JSONL file, a list of them, or a Hugging Face data set directory."""

    path: Path | list[Path]
    columns: ColumnsConfig = ColumnsConfig()
    prompt_template: str = Field("{prompt}", description="text around each prompt; `{prompt}` stands for it")
    completion_template: str = Field(
        "{completion}", description="text around each completion, chosen or rejected answer"
    )
    max_rows: int | None = Field(None, ge=1, description="use the first so many rows")
    bad_rows: Literal["error", "quarantine"] = "error"
    max_prompt_tokens: int = Field(1024, ge=1)
    long_prompts: Literal["error", "truncate", "quarantine"] = "error"
    shuffle: bool = True


class RewardPart(Section):
    """One summand of the reward: `weight` times what `kind` gives for a finished response.

    kind: `model` the reward model's scalar; `verifier` a rule by `name` (`arithmetic`, `gsm8k`) that compares the
    response with column `answer`; `python` a user's callable `entry_point` = `package.module:function`, called with
    (prompt, response, fields).
    """

    kind: Literal["model", "verifier", "python"]
    weight: float = 1.0
    name: Literal["arithmetic", "gsm8k"] | None = None
    answer: str = Field("answer", description="column that holds the expected answer (verifier)")
    entry_point: str | None = None
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments for the entry point")
