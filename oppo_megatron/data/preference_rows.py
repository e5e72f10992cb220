"""Token rows for `oppo dpo` (pairs of different answers) and `oppo kto` (completions that are wanted or unwanted)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from oppo_megatron.config.data import DataConfig
from oppo_megatron.data.examples import is_unequal, read_marked, read_pairs
from oppo_megatron.data.rows import Quarantine, RowProblems, require_some
from oppo_megatron.data.supervised_rows import Completion, LongRows, Pair, as_trained, tokenize
from oppo_megatron.data.tokenizer import Tokenizer
from oppo_megatron.errors import DataError


class Marked(NamedTuple):
    """Token ids of a completion that is wanted or not; `wanted` is [1] or [0], a list as every part of a row is."""

    prompt: list[int]
    completion: list[int]
    wanted: list[int]


def load_unequal_pairs(
    config: DataConfig, tokenizer: Tokenizer, *, max_tokens: int, long_rows: LongRows, quarantine: Quarantine
) -> list[Pair]:
    """Rows for DPO, as `load_pairs`; one whose answers are the same tokens is refused by `bad_rows`: its margin is always 0."""
    problems, is_first = RowProblems(quarantine), not quarantine.first
    examples = [
        each for each in read_pairs(config, tokenizer, problems) if is_unequal(each, each.answers, config, problems)
    ]
    cut = f" once they are cut to max_tokens={max_tokens}"
    rows = [
        Pair(*parts)
        for example, parts in tokenize(examples, config, tokenizer, max_tokens, long_rows, problems)
        if is_unequal(example, parts[1:], config, problems, cut)
    ]
    require_some(len(rows), config, problems)
    if is_first:
        quarantine.first = as_trained(quarantine.first, rows[0], tokenizer)
    return rows


def load_marked(
    config: DataConfig, tokenizer: Tokenizer, *, max_tokens: int, long_rows: LongRows, quarantine: Quarantine
) -> list[Marked]:
    """Rows for KTO: completions with a label, or pairs, of which each is two rows, the chosen answer wanted.

    `max_tokens` bounds prompt + completion.  Raises DataError as `load_pairs`, and where no column says which are wanted, or
    all rows are of one kind.
    """
    problems, is_first = RowProblems(quarantine), not quarantine.first
    marked = read_marked(config, tokenizer, problems)
    examples = [example for example, _ in marked]
    wanted = {id(example): mark for example, mark in marked}
    tokenized = tokenize(examples, config, tokenizer, max_tokens, long_rows, problems)
    rows = [Marked(prompt, answer, [int(wanted[id(example)])]) for example, (prompt, answer) in tokenized]
    if is_first:
        texts = {"prompt": tokenized[0][0].prompt, "completion": tokenized[0][0].answers[0]}
        shown = as_trained(texts, Completion(rows[0].prompt, rows[0].completion), tokenizer)
        quarantine.first = shown | {"label": "wanted" if rows[0].wanted[0] else "unwanted"}
    _tell_of_kinds(rows, quarantine)
    return rows


def _tell_of_kinds(rows: Sequence[Marked], quarantine: Quarantine) -> None:
    """A note of how many are wanted; DataError where all or none are."""
    num_wanted = sum(row.wanted[0] for row in rows)
    if num_wanted in (0, len(rows)):
        kind = "wanted" if num_wanted else "unwanted"
        raise DataError(
            f"all {len(rows)} rows are {kind}: KTO learns from both; give rows of both kinds, or fine-tune on wanted ones with "
            "`oppo sft`"
        )
    quarantine.note(f"{num_wanted} of {len(rows)} completions are wanted, {len(rows) - num_wanted} are not")
    kinds = [{(*row.prompt, -1, *row.completion) for row in rows if row.wanted[0] == kind} for kind in (0, 1)]
    if both := len(kinds[0] & kinds[1]):
        quarantine.note(f"{both} completions are wanted in one row and unwanted in another")
