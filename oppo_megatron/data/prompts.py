from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oppo_megatron.config.data import PromptDataConfig
from oppo_megatron.data.examples import read_prompts
from oppo_megatron.data.rows import Quarantine, RowProblems, require_some
from oppo_megatron.data.tokenizer import Tokenizer, encode_prompt, end_of_prompt
from oppo_megatron.errors import DataError, OppoError
from oppo_megatron.records import Prompt

Check = Callable[[Mapping[str, Any]], None]
"""Raises an OppoError if a row's other columns are unusable."""
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class PromptSet:
    """`rows`: without numbers in the stream (`seq_id` -1). `truncated`, `chats`: rows that were cut, or that the chat template
    rendered."""

    rows: list[Prompt]
    truncated: frozenset[int] = frozenset()
    num_quarantined: int = 0
    responses_per_prompt: int = 1
    chats: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_duplicates(self) -> int:
        return len(self.rows) - len({row.tokens for row in self.rows})

    @property
    def num_truncated(self) -> int:
        return sum(row.row in self.truncated for row in self.rows)

    def without(self, places: Collection[int]) -> PromptSet:
        """Set the rows at `places` aside."""
        rows = [row for place, row in enumerate(self.rows) if place not in places]
        return replace(self, rows=rows, num_quarantined=self.num_quarantined + len(places))

    @property
    def rollouts_per_pass(self) -> int:
        return len(self.rows) * self.responses_per_prompt

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for row in self.rows:
            fields = json.dumps(row.fields, sort_keys=True, default=str, ensure_ascii=False)
            digest.update(f"{row.row}\0{row.tokens}\0{row.text}\0{fields}\n".encode())
        return digest.hexdigest()


def load_prompts(
    config: PromptDataConfig, tokenizer: Tokenizer, *, quarantine: Quarantine, check: Check | None = None,
    responses_per_prompt: int = 1,
) -> PromptSet:  # fmt: skip
    """`bad_rows` also covers rows that `check` refuses. Truncation keeps the END. Raises DataError, also if no row is left."""
    problems, is_first = RowProblems(quarantine), not quarantine.first
    rows: list[Prompt] = []
    truncated = set[int]()
    examples = read_prompts(config, tokenizer, problems)
    for number, example in enumerate(examples):
        file, line, most = example.row.file, example.row.line, config.max_prompt_tokens
        quarantine.progress(f"{file}: {number} of {len(examples)} prompts tokenized")
        tokens, text = encode_prompt(tokenizer, example.prompt), example.prompt
        try:
            if check is not None:
                check(example.fields)
        except OppoError as error:
            problems.report(file, line, str(error), config.bad_rows, once=True)
            continue
        if not tokens:
            problems.report(file, line, "the prompt has no token", config.bad_rows)
            continue
        if len(tokens) > most and config.long_rows != "truncate":
            longer = f"more than data.max_prompt_tokens={most}; raise it, or set data.long_rows=truncate"
            reason = f"the prompt has {len(tokens)} tokens, {longer}"
            problems.report(file, line, reason, config.long_rows, setting="data.long_rows", once=longer)
            continue
        if len(tokens) > most:
            tokens = end_of_prompt(tokenizer, tokens, most)
            text = tokenizer.decode(tokens)
            truncated.add(example.row.index)
        rows.append(Prompt(-1, example.row.index, text, tuple(tokens), example.fields, f"{file}:{line}"))
    require_some(len(rows), config, problems)
    if is_first:
        quarantine.first = {"prompt": rows[0].text}
    chats = frozenset(example.row.index for example in examples if example.chat)
    return PromptSet(rows, frozenset(truncated), problems.num_quarantined, responses_per_prompt, chats)


class PromptStream(Iterator[Prompt]):
    """Prompts in training order; `seq_id` is the stream position, one per response, over all epochs.

    Ends after `epochs` passes or `limit` prompts. `left_out` positions count neither for `limit` nor for `planned`.
    """

    def __init__(
        self, prompts: PromptSet, seed: int, *, epochs: int | None = None, limit: int | None = None, shuffle: bool = True,
        start: int = 0, left_out: Set[int] = frozenset(),
    ):  # fmt: skip
        if not len(prompts):
            raise DataError("the prompt set is empty; at least one prompt is needed.")
        most = None if epochs is None else epochs * prompts.rollouts_per_pass
        self.planned = min((end for end in (limit, most) if end is not None), default=None)
        beyond = limit
        if beyond is not None:
            for position in sorted(left_out):
                beyond += position < beyond
        self.end: int | None = min((end for end in (beyond, most) if end is not None), default=None)
        self._prompts, self._seed, self._shuffle, self._left_out = prompts, seed, shuffle, left_out
        self._position, self._epoch = start, -1
        self._order: list[int] = []

    def __next__(self) -> Prompt:
        while self._position in self._left_out:
            self._position += 1
        if self.end is not None and self._position >= self.end:
            raise StopIteration
        prompt = self.at(self._position)
        self._position += 1
        return prompt

    def at(self, position: int) -> Prompt:
        epoch, place = divmod(position // self._prompts.responses_per_prompt, len(self._prompts))
        if epoch != self._epoch:
            self._order = epoch_order(len(self._prompts), self._seed, epoch, self._shuffle)
            self._epoch = epoch
        return replace(self._prompts.rows[self._order[place]], seq_id=position)


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """A permutation by raw Philox4x64 words, which are equal everywhere."""
    if not shuffle:
        return list(range(num_rows))
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed={seed} is out of range; choose one from 0 to {MAX_SEED}.")
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_rows)
    return [int(row) for row in np.argsort(words, kind="stable")]
