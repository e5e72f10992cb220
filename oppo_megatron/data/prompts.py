from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.config.data import PromptDataConfig
from oppo_megatron.data.examples import read_prompts
from oppo_megatron.data.rows import Quarantine, RowProblems, require_some
from oppo_megatron.data.tokenizer import Tokenizer, encode_prompt, end_of_prompt
from oppo_megatron.errors import DataError, OppoError
from oppo_megatron.records import Prompt, Source

Check = Callable[[Mapping[str, Any]], None]
"""Raises an OppoError if a row's other columns are unusable."""
MAX_SEED = 2**64 - 1


class Origin(NamedTuple):
    """File and line of a row, its entry of `data.path`, and whether it was cut."""

    place: str = ""
    source: Source = Source()
    is_cut: bool = False


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
    def origins(self) -> list[Origin]:
        return [Origin(row.place, row.source, row.row in self.truncated) for row in self.rows]

    @property
    def sources(self) -> list[Source]:
        return [row.source for row in self.rows]

    @property
    def rollouts_per_pass(self) -> Fraction:
        """Mean over passes; weights may leave a fraction of a row."""
        return RowOrder(self.sources).epoch_rows * self.responses_per_prompt

    def rollouts(self, passes: int) -> int:
        return RowOrder(self.sources).rows(passes) * self.responses_per_prompt

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
        rows.append(Prompt(-1, example.row.index, text, tuple(tokens), example.fields, f"{file}:{line}", example.row.source))
    require_some(len(rows), config, problems, [row.source for row in rows])
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
        self._order = RowOrder(prompts.sources, seed, shuffle)
        most = None if epochs is None else self._order.rows(epochs) * prompts.responses_per_prompt
        self.planned = min((end for end in (limit, most) if end is not None), default=None)
        beyond = limit
        if beyond is not None:
            for position in sorted(left_out):
                beyond += position < beyond
        self.end: int | None = min((end for end in (beyond, most) if end is not None), default=None)
        self._prompts, self._left_out, self._position = prompts, left_out, start
        self._epoch, self._rows = -1, list[int]()

    def __next__(self) -> Prompt:
        while self._position in self._left_out:
            self._position += 1
        if self.end is not None and self._position >= self.end:
            raise StopIteration
        prompt = self.at(self._position)
        self._position += 1
        return prompt

    def at(self, position: int) -> Prompt:
        epoch, place = self._order.locate(position // self._prompts.responses_per_prompt)
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self._order.epoch(epoch)
        return replace(self._prompts.rows[self._rows[place]], seq_id=position)


class RowOrder:
    """The rows of each epoch in training order, by seed, weights and epoch alone.

    An epoch has each row `weight` times.  A source that ends an epoch within a pass over its rows continues this pass in the next
    epoch: after k epochs it has given k x weight x its rows, rounded up or down.  `sources`: of each row.  Raises DataError.
    """

    def __init__(self, sources: Iterable[Source], seed: int = 0, shuffle: bool = True):
        self.parts = [(len(list(rows)), source) for source, rows in groupby(sources)]
        if not self.parts:
            raise DataError("the data set is empty; at least one row is needed.")
        for num_rows, (path, weight) in self.parts:
            if num_rows * Fraction(repr(weight)) < 1:
                raise DataError(
                    f"the weight of {path} in data.path is {weight:g}, and an epoch would have less than one of its {num_rows} "
                    f"usable rows; set it to at least {math.ceil(1000 / num_rows) / 1000:g}, or remove the entry"
                )
        self._seed, self._shuffle = seed, shuffle
        shares = (num_rows * Fraction(repr(source.weight)) for num_rows, source in self.parts)
        self._ends = list(accumulate(shares, initial=Fraction(0)))
        self.epoch_rows = self._ends[-1]

    def rows(self, epochs: float) -> int:
        """Number of rows of the first epochs; may be a fraction."""
        return math.ceil(epochs * self.epoch_rows)

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, place in it) of a position in the stream of all epochs."""
        epoch = position // self.epoch_rows
        return epoch, position - self.rows(epoch)

    def epoch(self, number: int) -> list[int]:
        slots, first = list[Ints](), 0
        for place, (num_rows, _) in enumerate(self.parts):
            # Differences of rounded sums: for shares of at least one row, none is negative.
            begin, end = (math.ceil(k * self._ends[place + 1]) - math.ceil(k * self._ends[place]) for k in (number, number + 1))
            passes = range(begin // num_rows, -(-end // num_rows))
            given = [epoch_order(num_rows, self._seed, each, self._shuffle, 1 + place) for each in passes]
            drawn = np.concatenate([np.arange(0), *given])[begin - passes.start * num_rows : end - passes.start * num_rows]
            slots.append(first + (np.sort(drawn) if self._shuffle else drawn))
            first += num_rows
        rows = np.concatenate(slots)
        return list(rows[epoch_order(len(rows), self._seed, number, self._shuffle)].tolist())


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True, stream: int = 0) -> Ints:
    """A permutation by raw Philox4x64 words, which are equal everywhere."""
    if not shuffle:
        return np.arange(num_rows)
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed={seed} is out of range; choose one from 0 to {MAX_SEED}.")
    bits = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64), counter=np.array([0, 0, 0, stream], dtype=np.uint64))
    return np.argsort(bits.random_raw(num_rows), kind="stable")
