"""Token rows for `oppo sft` (prompt, completion), `oppo rm` (prompt, chosen, rejected) and `oppo prm` (prompt, steps, labels),
and the order of their batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from oppo_megatron.config.data import DataConfig
from oppo_megatron.data.examples import Example, read_completions, read_pairs, read_steps
from oppo_megatron.data.prompt_tokens import encode_answers, encode_prompt, end_of_prompt
from oppo_megatron.data.prompts import epoch_order
from oppo_megatron.data.rows import Quarantine, RowProblems, require_some
from oppo_megatron.data.stops import require_stop_texts
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.errors import DataError
from oppo_megatron.token_text import StepEnds

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


class Steps(NamedTuple):
    """Token ids of one answer in steps, which ends with EOS unless cut.

    `ends`: the last tokens of the steps that have labels, by their places in the completion; `labels` from 0 to 1.
    """

    prompt: list[int]
    completion: list[int]
    ends: list[int]
    labels: list[float]


def load_completions(
    config: DataConfig, tokenizer: Tokenizer, *, max_tokens: int, long_rows: LongRows, quarantine: Quarantine
) -> list[Completion]:
    """Rows for SFT.  `max_tokens` bounds prompt + completion (EOS counted); `long_rows` says what becomes of longer
    ones.

    Raises `DataError` with every refused row at once, or if no row is left.
    """
    problems, is_first = RowProblems(quarantine), not quarantine.first
    examples = read_completions(config, tokenizer, problems)
    rows = [Completion(*parts) for _, parts in tokenize(examples, config, tokenizer, max_tokens, long_rows, problems)]
    if is_first:
        quarantine.first = as_trained(quarantine.first, rows[0], tokenizer)
    return rows


def load_pairs(
    config: DataConfig, tokenizer: Tokenizer, *, max_tokens: int, long_rows: LongRows, quarantine: Quarantine
) -> list[Pair]:
    """Rows for the reward model; `max_tokens` bounds prompt + the longer answer.  Otherwise as `load_completions`."""
    problems, is_first = RowProblems(quarantine), not quarantine.first
    examples = read_pairs(config, tokenizer, problems)
    rows = [Pair(*parts) for _, parts in tokenize(examples, config, tokenizer, max_tokens, long_rows, problems)]
    if is_first:
        quarantine.first = as_trained(quarantine.first, rows[0], tokenizer)
    return rows


def load_steps(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    separator: str,
    max_tokens: int,
    long_rows: LongRows,
    quarantine: Quarantine,
) -> list[Steps]:
    """Rows for the process reward model: the steps joined by the separator and tokenized as one text, as a policy writes it.

    A row whose text has another number of steps than labels is refused.  Otherwise as `load_completions`; ConfigError for a
    separator that no answer can have.
    """
    require_stop_texts([separator], tokenizer, "separator")
    problems, is_first = RowProblems(quarantine), not quarantine.first
    step_ends = StepEnds(separator, tokenizer.decode)
    rows: list[Steps] = []
    for example, labels in read_steps(config, tokenizer, problems, separator):
        tokenized = _tokenize_one(example, config, tokenizer, max_tokens, long_rows, problems)
        if tokenized is None:
            continue
        prompt, completion = tokenized
        is_cut = completion[-1] not in tokenizer.eos_ids
        ends = step_ends.of(encode_answers(tokenizer, example.prompt, example.answers)[1] if is_cut else completion)
        kept = [(end, label) for end, label in zip(ends, labels, strict=False) if label is not None and end < len(completion)]
        if len(ends) != len(labels):
            reason = _miscounted(len(ends), len(labels), separator)
            problems.report(example.row.file, example.row.line, reason, config.bad_rows, once="by the separator")
        elif not kept:
            reason = f"no step with a label ends within max_tokens={max_tokens}"
            problems.report(example.row.file, example.row.line, reason, config.bad_rows)
        else:
            rows.append(Steps(prompt, completion, [end for end, _ in kept], [label for _, label in kept]))
    require_some(len(rows), config, problems)
    if is_first:
        quarantine.first = as_trained(quarantine.first, Completion(*rows[0][:2]), tokenizer)
    return rows


def _miscounted(found: int, labelled: int, separator: str) -> str:
    return (
        f"the text has {found} steps by the separator {separator!r}, but the row has {labelled}: a step has the separator within "
        "it, or a token holds several steps; split the step, or set another separator"
    )


def tokenize(
    examples: Sequence[Example],
    config: DataConfig,
    tokenizer: Tokenizer,
    max_tokens: int,
    long_rows: LongRows,
    problems: RowProblems,
) -> list[tuple[Example, list[list[int]]]]:
    """The examples that can be used, each with the tokens of its prompt and answers.  Raises DataError as `load_completions`."""
    each = ((example, _tokenize_one(example, config, tokenizer, max_tokens, long_rows, problems)) for example in examples)
    tokenized = [(example, parts) for example, parts in each if parts is not None]
    require_some(len(tokenized), config, problems)
    return tokenized


def _tokenize_one(
    example: Example,
    config: DataConfig,
    tokenizer: Tokenizer,
    max_tokens: int,
    long_rows: LongRows,
    problems: RowProblems,
) -> list[list[int]] | None:
    """Prompt and answers; None if the row is refused, which `problems` hears of."""
    problems.quarantine.progress(f"{example.row.file}: row {example.row.index + 1} is tokenized")
    prompt, *answers = encode_answers(tokenizer, example.prompt, example.answers)
    if prompt != encode_prompt(tokenizer, example.prompt):
        problems.quarantine.note(
            f"{example.row.file}: in some rows a token holds the end of the prompt and the beginning of the answer, so a policy "
            "that is asked with the prompt alone reads other tokens; let answers begin with the white space that prompts end with"
        )
    answers = [_ended(answer, tokenizer) for answer in answers]
    num_tokens = len(prompt) + max(len(answer) for answer in answers)
    if not prompt:
        problems.report(example.row.file, example.row.line, "the prompt has no token", config.bad_rows)
        return None
    if num_tokens <= max_tokens:
        return [prompt, *answers]
    if long_rows == "truncate":
        return _cut(tokenizer, prompt, answers, max_tokens)
    reason = f"prompt and answer have {num_tokens} tokens, more than max_tokens={max_tokens}"
    problems.report(example.row.file, example.row.line, reason, long_rows, setting="data.long_rows")
    return None


def as_trained(texts: Mapping[str, str], row: Completion | Pair, tokenizer: Tokenizer) -> dict[str, str]:
    """The parts of `row` as text: those of `texts` that are its very tokens, the others read back from them.

    A row may have been cut, at its length or after its EOS, and `texts` may be of one that was set aside.
    """

    parts = row._asdict()
    prompt, *answers = encode_answers(tokenizer, texts["prompt"], [texts[part] for part in parts if part != "prompt"])
    known = dict(zip(parts, [prompt, *answers], strict=True))
    return {
        part: texts[part] if ids in (known[part], [*known[part], tokenizer.eos_id]) else tokenizer.decode(ids)
        for part, ids in parts.items()
    }


def _ended(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """`tokens` with one EOS at the end, the tokenizer's where they have none.

    What a chat template writes after its own EOS (a newline) is left out.
    """
    last = max((place for place, token in enumerate(tokens) if token in tokenizer.eos_ids), default=None)
    if last is not None and not tokenizer.decode(tokens[last + 1 :]).strip():
        return tokens[: last + 1]
    return [*tokens, tokenizer.eos_id]


def _cut(tokenizer: Tokenizer, prompt: list[int], answers: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Cut the prompt's beginning, to no less than half of `max_tokens`; then the answers' ends, and their EOS."""
    longest = max(len(answer) for answer in answers)
    room = max(max_tokens - longest, max_tokens // 2)
    prompt = end_of_prompt(tokenizer, prompt, room) if room < len(prompt) else prompt
    return [prompt, *(answer[: max_tokens - len(prompt)] for answer in answers)]


def num_duplicates(rows: Sequence[Any]) -> int:
    """Completions or pairs whose tokens an earlier one has too."""
    return len(rows) - len({tuple(tuple(part) for part in row) for row in rows})


class Passed(NamedTuple):
    """How far a run is: steps made, and rows that they have taken, each as often as it was."""

    steps: int = 0
    rows: int = 0

    def step(self, num_rows: int) -> Passed:
        return Passed(self.steps + 1, self.rows + num_rows)


BEGINNING = Passed()


def num_batches(
    num_rows: int, batch_size: int, epochs: float, max_steps: int | None, passed: Passed = BEGINNING
) -> int:
    """Steps of the whole run: those made, and the batches that `batches` gives from there."""
    left = max(0, math.ceil(epochs * num_rows) - passed.rows)
    steps = passed.steps + math.ceil(left / batch_size)
    return steps if max_steps is None else min(steps, max_steps)


def batches(
    num_rows: int,
    batch_size: int,
    seed: int,
    epochs: float,
    max_steps: int | None,
    shuffle: bool = True,
    passed: Passed = BEGINNING,
) -> Iterator[list[int]]:
    """Row indices of each optimizer step from `passed` on.

    The epochs' permutations follow each other without a gap, so every batch is full but the last.  A fraction of an
    epoch is the beginning of its permutation.
    """
    if num_rows < 1:
        raise DataError("there is no row to make batches of; at least one is needed.")
    left = math.ceil(epochs * num_rows) - passed.rows
    epoch, first = divmod(passed.rows, num_rows)
    pending = epoch_order(num_rows, seed, epoch, shuffle)[first:]
    for _ in range(passed.steps, num_batches(num_rows, batch_size, epochs, max_steps, passed)):
        size = min(batch_size, left)
        left -= size
        while len(pending) < size:
            epoch += 1
            pending.extend(epoch_order(num_rows, seed, epoch, shuffle))
        yield pending[:size]
        pending = pending[size:]
