"""Common parts of TRL's trainers: forced lengths, the clock, a tokenizer of numbers.

Runs in the environment of `requirements-trl.txt` and imports nothing of oppo_megatron.  The trainers' code is not changed.

Legend: B rows, P prompt tokens, L response tokens of the longest row, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class PeerError(Exception):
    """An error that the caller can correct."""


class Batch(NamedTuple):
    """The rows of a step as TRL has them, without padding, and the tokens that it scores and trains with it."""

    prompts: list[list[int]]
    responses: list[list[int]]
    computed_tokens: int


class Clock:
    """Seconds of a step by phase.

    other     from the step's begin to the call of TRL's function that generates: the data loader, garbage collection
    generate  that function
    score     from its return to the first forward of the update: log-probs, frozen models, rewards, advantages
    train     from there to the callback `on_step_end`: forward, backward, optimizer, and TRL's metrics
    """

    PHASES = ("other", "generate", "score", "train")

    def __init__(self, synchronize: Callable[[], None]):
        self._synchronize = synchronize
        self.begin()

    def begin(self) -> None:
        self._synchronize()
        self._marks = [time.perf_counter()]

    def enter(self, phase: str) -> None:
        """Enter a phase; no effect if the step is already in it."""
        if len(self._marks) == self.PHASES.index(phase):
            self._synchronize()
            self._marks.append(time.perf_counter())

    def end(self) -> dict[str, float]:
        """Return seconds per phase, and of the step.  Raises PeerError if TRL did not pass through all phases in order."""
        self._synchronize()
        if len(self._marks) != len(self.PHASES):
            raise PeerError(f"a step of TRL had {len(self._marks)} phases, not {', '.join(self.PHASES)}")
        ends = [*self._marks[1:], time.perf_counter()]
        seconds = {f"{name}_s": ends[i] - self._marks[i] for i, name in enumerate(self.PHASES)}
        return {"step_s": ends[-1] - self._marks[0], **seconds}


class ForcedRows:
    """A logits processor for one call of `generate`: every row draws EOS as its last token, and never before.

    Also never drawn is the padding token: TRL would take it for the end of the row.
    """

    def __init__(self, lengths: Sequence[int], prompt_tokens: int, eos_id: int, pad_id: int):
        self.prompt_tokens, self.eos_id, self.banned = prompt_tokens, eos_id, [eos_id, pad_id]
        self.ending: dict[int, list[int]] = {}  # rows by the number of their last token
        for row, length in enumerate(lengths):
            self.ending.setdefault(length, []).append(row)
        self.seconds = 0.0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores [B, V] of the next token, changed in place."""
        started = time.perf_counter()
        rows = self.ending.get(input_ids.shape[1] - self.prompt_tokens + 1)
        scores[:, self.banned] = -math.inf
        if rows is not None:
            scores[rows] = -math.inf
            scores[rows, self.eos_id] = 0.0
        self.seconds += time.perf_counter() - started
        return scores


class ForcedGenerate:
    """`generate` of the policy with the forced lengths of the rows that it is called with, in their order."""

    def __init__(self, generate: Callable[..., Any], work: Mapping[str, Any]):
        self.generate, self.work = generate, work
        self.rows = 0  # generated so far
        self.seconds = 0.0

    def __call__(self, input_ids: Any, **options: Any) -> Any:
        count = len(input_ids)
        lengths = self.work["lengths"][self.rows : self.rows + count]
        forced = ForcedRows(lengths, input_ids.shape[1], self.work["eos_id"], self.work["pad_id"])
        output = self.generate(input_ids=input_ids, logits_processor=[forced], **options)
        self.rows += count
        self.seconds += forced.seconds
        return output


def build_tokenizer(vocab_size: int, eos_id: int, pad_id: int) -> Any:
    """A tokenizer whose tokens are the numbers of the vocabulary: prompts come as token ids, or as their `token_text`s."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({token_text(i): i for i in range(vocab_size)}, unk_token=token_text(eos_id)))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=token_text(eos_id), pad_token=token_text(pad_id), padding_side="left"
    )


def token_text(token: int) -> str:
    """No token's text is part of another's: EOS is looked for in the whole text."""
    return f"<{token}>"


def run_settings(work: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of both trainers: one process, no logging, nothing saved, no gradient checkpointing."""
    micro_batch = work["micro_batch"]
    return {
        "output_dir": work["output_dir"],
        "use_cpu": work["device"] == "cpu",
        "gradient_checkpointing": False,
        "seed": work["seed"],
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": work["batch_size"] // micro_batch,
        "temperature": work["temperature"],
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        **work["optimizer"],
    }
