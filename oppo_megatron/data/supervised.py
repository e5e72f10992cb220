"""Token rows for `oppo sft` (prompt, completion) and `oppo rm` (prompt, chosen, rejected), and the order of their
batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from oppo_megatron.config.data import DataConfig
from oppo_megatron.data.examples import Example, read_completions, read_pairs
from oppo_megatron.data.order import epoch_order
from oppo_megatron.data.rows import Quarantine, RowProblems, require_some
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.errors import DataError

LongRows = Literal["error", "truncate", "quarantine"]


class Completion(NamedTuple):
    """Token ids of one row; the completion ends with EOS unless it was cut."""

    prompt: list[int]
    completion: list[int]


class Pair(NamedTuple):
    """Token ids of one preference; both answers end with EOS unless cut."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def load_completions(
    config: DataConfig, tokenizer: Tokenizer, *, max_tokens: int, long_rows: LongRows, quarantine: Quarantine
) -> list[Completion]:
    """Rows for SFT.  `max_tokens` bounds prompt + completion (EOS counted); `long_rows` says what becomes of longer
    ones.

    Raises `DataError` with every refused row at once, or if no row is left.
    """
    problems, is_first = RowProblems(quarantine), not quarantine.first
    examples = read_completions(config, tokenizer, problems)
    rows = [Completion(*parts) for parts in _tokenize(examples, config, tokenizer, max_tokens, long_rows, problems)]
    if is_first and _fills(rows[0], max_tokens):
        quarantine.first = {part: tokenizer.decode(ids) for part, ids in rows[0]._asdict().items()}
    return rows


def load_pairs(
    config: DataConfig, tokenizer: Tokenizer, *, max_tokens: int, long_rows: LongRows, quarantine: Quarantine
) -> list[Pair]:
    """Rows for the reward model; `max_tokens` bounds prompt + the longer answer.  Otherwise as `load_completions`."""
    problems, is_first = RowProblems(quarantine), not quarantine.first
    examples = read_pairs(config, tokenizer, problems)
    rows = [Pair(*parts) for parts in _tokenize(examples, config, tokenizer, max_tokens, long_rows, problems)]
    if is_first and _fills(rows[0], max_tokens):
        quarantine.first = {part: tokenizer.decode(ids) for part, ids in rows[0]._asdict().items()}
    return rows


def _tokenize(
    examples: Sequence[Example],
    config: DataConfig,
    tokenizer: Tokenizer,
    max_tokens: int,
    long_rows: LongRows,
    problems: RowProblems,
) -> list[list[list[int]]]:
    tokenized: list[list[list[int]]] = []
    for example in examples:
        prompt = tokenizer.encode(example.prompt)
        answers = [_ended(tokenizer.encode(answer), tokenizer) for answer in example.answers]
        num_tokens = len(prompt) + max(len(answer) for answer in answers)
        if not prompt:
            problems.report(example.row.file, example.row.line, "the prompt has no token", config.bad_rows)
        elif num_tokens <= max_tokens:
            tokenized.append([prompt, *answers])
        elif long_rows == "truncate":
            tokenized.append(_cut(prompt, answers, max_tokens))
        else:
            reason = f"prompt and answer have {num_tokens} tokens, more than max_tokens={max_tokens}"
            problems.report(example.row.file, example.row.line, reason, long_rows, setting="long_rows")
    require_some(len(tokenized), config, problems)
    return tokenized


def _fills(row: Completion | Pair, max_tokens: int) -> bool:
    """Whether a row is as long as it may be: one that was cut is."""
    prompt, *answers = row
    return len(prompt) + max(len(answer) for answer in answers) >= max_tokens


def _ended(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """`tokens` with one EOS at the end, the tokenizer's where they have none.

    What a chat template writes after its own EOS (a newline) is left out.
    """
    last = max((place for place, token in enumerate(tokens) if token in tokenizer.eos_ids), default=None)
    if last is not None and not tokenizer.decode(tokens[last + 1 :]).strip():
        return tokens[: last + 1]
    return [*tokens, tokenizer.eos_id]


def _cut(prompt: list[int], answers: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Cut the prompt's beginning, to no less than half of `max_tokens`; then the answers' ends, and their EOS."""
    longest = max(len(answer) for answer in answers)
    room = max(max_tokens - longest, max_tokens // 2)
    prompt = prompt[-room:]
    return [prompt, *(answer[: max_tokens - len(prompt)] for answer in answers)]


def num_duplicates(rows: Sequence[Any]) -> int:
    """Completions or pairs whose tokens an earlier one has too."""
    return len(rows) - len({tuple(tuple(part) for part in row) for row in rows})


def num_batches(num_rows: int, batch_size: int, epochs: float, max_steps: int | None) -> int:
    """How many batches `batches` gives."""
    steps = math.ceil(math.ceil(epochs * num_rows) / batch_size)
    return steps if max_steps is None else min(steps, max_steps)


def batches(
    num_rows: int, batch_size: int, seed: int, epochs: float, max_steps: int | None, shuffle: bool = True
) -> Iterator[list[int]]:
    """Row indices of each optimizer step.

    The epochs' permutations follow each other without a gap, so every batch is full but the last.  A fraction of an
    epoch is the beginning of its permutation.
    """
    if num_rows < 1:
        raise DataError("there is no row to make batches of; at least one is needed.")
    num_indices = math.ceil(epochs * num_rows)
    steps = num_batches(num_rows, batch_size, epochs, max_steps)
    pending: list[int] = []
    epoch = 0
    for step in range(steps):
        size = min(batch_size, num_indices - step * batch_size)
        while len(pending) < size:
            pending.extend(epoch_order(num_rows, seed, epoch, shuffle))
            epoch += 1
        yield pending[:size]
        pending = pending[size:]
