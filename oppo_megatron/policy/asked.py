"""The request to a policy, as given to the ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oppo_megatron.config.model import ParallelConfig, RuntimeConfig
from oppo_megatron.policy.finding import Policy
from oppo_megatron.records import Prompt


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn (temperature 0: greedy), and ids that end responses besides the policy's own."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Terminal:
    """Write responses to the standard output, as they grow on a terminal; `as_json`: one JSON line each."""

    as_json: bool = False


@dataclass(frozen=True)
class OutputFile:
    """Responses go to a JSONL file; `settings`: all that the responses depend on."""

    path: Path
    settings: dict[str, Any]
    resume: bool = False


@dataclass(frozen=True)
class Conversation:
    """Turns are read from `source` (None: the standard input) and answered."""

    system: str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Request:
    """`prompts` have `seq_id` = place * `samples` + sample; a conversation has none.

    `max_length`: tokens of the longest prompt and its response.  `num_slots`: sequences that a replica decodes at once.
    `told_of_prompts`: lines about the rows of a file.
    """

    policy: Policy
    parallel: ParallelConfig
    runtime: RuntimeConfig
    drawing: Drawing
    prompts: tuple[Prompt, ...]
    samples: int
    num_slots: int
    max_length: int
    to: Terminal | OutputFile | Conversation
    told_of_prompts: str = ""


def settings_of(policy: Policy, drawing: Drawing, samples: int) -> dict[str, Any]:
    """The settings that, with the prompts, determine the responses, in plain JSON types."""
    return {
        "policy": str(policy.model.checkpoint or policy.directory),
        "dtype": policy.model.dtype,
        "samples": samples,
        "date": str(policy.tokenizer.date),
        **{name: list(value) if isinstance(value, tuple) else value for name, value in asdict(drawing).items()},
    }
