"""Random prompts for benchmarks that need no data file."""

from __future__ import annotations

import json
import random
from pathlib import Path

from oppo_megatron.data.tokenizer import train_sentencepiece

NUM_PROMPTS = 1024
VOCAB_SIZE = 262  # what a tokenizer of single characters over digits comes to, bytes included


def write_random_prompts(directory: Path, prompt_tokens: int) -> tuple[Path, Path]:
    """Write a digit tokenizer and `NUM_PROMPTS` prompts of `prompt_tokens` digits; return both paths."""
    rng = random.Random(1)  # noqa: S311  (to be drawn again, not to be secret)
    prompts = ["".join(rng.choices("0123456789", k=prompt_tokens)) for _ in range(NUM_PROMPTS)]
    tokenizer, rows = directory / "tokenizer.model", directory / "prompts.jsonl"
    train_sentencepiece([*prompts, "0123456789"], tokenizer, VOCAB_SIZE, model_type="char")
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return tokenizer, rows
