"""Token rows for `oppo sft`, `rm` and `dpo`."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from oppo_megatron.config.data import DataConfig
from oppo_megatron.config.evaluation import HeldoutConfig
from oppo_megatron.config.supervised import DPOConfig, RewardModelConfig, SupervisedConfig
from oppo_megatron.data.examples import Example, is_unequal, read_completions, read_marked, read_pairs, read_steps
from oppo_megatron.data.prompts import Origin, RowOrder
from oppo_megatron.data.rows import Quarantine, RowProblems, require_some
from oppo_megatron.data.tokenizer import Tokenizer, encode_answers, encode_prompt, end_of_prompt, require_stop_texts
from oppo_megatron.errors import DataError
from oppo_megatron.records import Source
from oppo_megatron.token_text import StepEnds

RowT = TypeVar("RowT", bound=tuple[list[Any], ...])


class Completion(NamedTuple):
    """The completion ends with EOS unless cut."""

    prompt: list[int]
    completion: list[int]


class Pair(NamedTuple):
    """Answers end with EOS unless cut."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class Steps(NamedTuple):
    """`ends`: last token of each labelled step; `labels`: 0 to 1."""

    prompt: list[int]
    completion: list[int]
    ends: list[int]
    labels: list[float]


class Marked(NamedTuple):
    """`wanted` is [1] or [0], a list like the other parts."""

    prompt: list[int]
    completion: list[int]
    wanted: list[int]


class Rows(list[RowT]):
    """Rows, with the origin of each."""

    def __init__(self, rows: Iterable[RowT], origins: Iterable[Origin] | None = None):
        super().__init__(rows)
        self.origins = [Origin()] * len(self) if origins is None else [*origins]

    @property
    def sources(self) -> list[Source]:
        return [origin.source for origin in self.origins]

    def at(self, places: Iterable[int]) -> Rows[RowT]:
        chosen = list(places)
        return Rows((self[place] for place in chosen), (self.origins[place] for place in chosen))


class RowLoader:
    """Tokenizes a data set; `max_tokens` bounds prompt + longest answer + EOS. Its methods raise DataError."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, max_tokens: int, quarantine: Quarantine):
        self._config, self._tokenizer, self._max_tokens = config, tokenizer, max_tokens
        self._quarantine, self._is_first = quarantine, not quarantine.first
        self._problems, self._cut = RowProblems(quarantine), set[int]()

    def completions(self) -> Rows[Completion]:
        examples = read_completions(self._config, self._tokenizer, self._problems)
        rows = self._rows((example, Completion(*parts)) for example, parts in self._tokenized(examples))
        self._show_first(rows[0])
        return rows

    def pairs(self) -> Rows[Pair]:
        examples = read_pairs(self._config, self._tokenizer, self._problems)
        rows = self._rows((example, Pair(*parts)) for example, parts in self._tokenized(examples))
        self._show_first(rows[0])
        return rows

    def unequal_pairs(self) -> Rows[Pair]:
        """Pairs for DPO, except with equal answers (margin 0)."""
        config, problems, cut = self._config, self._problems, f" once they are cut to max_tokens={self._max_tokens}"
        pairs = read_pairs(config, self._tokenizer, problems)
        pairs = [pair for pair in pairs if is_unequal(pair, pair.answers, config, problems)]
        tokenized = self._tokenized(pairs)
        rows = self._rows((pair, Pair(*parts)) for pair, parts in tokenized if is_unequal(pair, parts[1:], config, problems, cut))
        self._show_first(rows[0])
        return rows

    def marked(self) -> Rows[Marked]:
        """Labelled completions for KTO, or two per pair."""
        examples = read_marked(self._config, self._tokenizer, self._problems)
        wanted = {id(example): int(mark) for example, mark in examples}
        tokenized = self._tokenized([example for example, _ in examples])
        rows = self._rows((example, Marked(prompt, answer, [wanted[id(example)]])) for example, (prompt, answer) in tokenized)
        first = tokenized[0][0]
        texts = {"prompt": first.prompt, "completion": first.answers[0]}
        self._show_first(Completion(*rows[0][:2]), texts, label="wanted" if rows[0].wanted[0] else "unwanted")
        num_wanted = sum(row.wanted[0] for row in rows)
        if num_wanted in (0, len(rows)):
            kind = "wanted" if num_wanted else "unwanted"
            raise DataError(
                f"all {len(rows)} rows are {kind}: KTO learns from both; give rows of both kinds, or fine-tune on wanted ones "
                "with `oppo sft`"
            )
        self._quarantine.note(f"{num_wanted} of {len(rows)} completions are wanted, {len(rows) - num_wanted} are not")
        kinds = [{(*row.prompt, -1, *row.completion) for row in rows if row.wanted[0] == kind} for kind in (0, 1)]
        if both := len(kinds[0] & kinds[1]):
            self._quarantine.note(f"{both} completions are wanted in one row and unwanted in another")
        return rows

    def steps(self, separator: str) -> Rows[Steps]:
        """Joined steps, tokenized as one text."""
        tokenizer = self._tokenizer
        require_stop_texts([separator], tokenizer, "separator")
        step_ends = StepEnds(separator, tokenizer.decode)
        labelled_rows: list[tuple[Example, Steps]] = []
        for example, labels in read_steps(self._config, tokenizer, self._problems, separator):
            if (parts := self._tokens(example)) is None:
                continue
            prompt, completion = parts
            is_cut = completion[-1] not in tokenizer.eos_ids
            ends = step_ends.of(encode_answers(tokenizer, example.prompt, example.answers)[1] if is_cut else completion)
            labelled = [(end, label) for end, label in zip(ends, labels, strict=False) if label is not None]
            kept = [(end, label) for end, label in labelled if end < len(completion)]
            if len(ends) != len(labels):
                self._refuse(
                    example,
                    f"the text has {len(ends)} steps by the separator {separator!r}, but the row has {len(labels)}: a step has "
                    "the separator within it, or a token holds several steps; split the step, or set another separator",
                    once="by the separator",
                )
            elif not kept:
                self._refuse(example, f"no step with a label ends within max_tokens={self._max_tokens}")
            else:
                row = Steps(prompt, completion, [end for end, _ in kept], [label for _, label in kept])
                labelled_rows.append((example, row))
        rows = self._rows(labelled_rows)
        self._show_first(Completion(*rows[0][:2]))
        return rows

    def _tokenized(self, examples: Sequence[Example]) -> list[tuple[Example, list[list[int]]]]:
        each = ((example, self._tokens(example)) for example in examples)
        tokenized = [(example, parts) for example, parts in each if parts is not None]
        require_some(len(tokenized), self._config, self._problems)
        return tokenized

    def _rows(self, found: Iterable[tuple[Example, RowT]]) -> Rows[RowT]:
        kept = list(found)
        require_some(len(kept), self._config, self._problems, [each.row.source for each, _ in kept])
        origins = (Origin(f"{each.row.file}:{each.row.line}", each.row.source, id(each) in self._cut) for each, _ in kept)
        RowOrder(each.row.source for each, _ in kept)  # refuses a weight that is too small
        return Rows((row for _, row in kept), origins)

    def _tokens(self, example: Example) -> list[list[int]] | None:
        tokenizer, row, max_tokens = self._tokenizer, example.row, self._max_tokens
        self._quarantine.progress(f"{row.file}: row {row.index + 1} is tokenized")
        prompt, *answers = encode_answers(tokenizer, example.prompt, example.answers)
        if prompt != encode_prompt(tokenizer, example.prompt):
            self._quarantine.note(
                f"{row.file}: in some rows one token joins the end of the prompt and the beginning of the answer; a policy that "
                "is given the prompt alone reads other tokens: let answers begin with the white space that prompts end with"
            )
        answers = [_ended(answer, tokenizer) for answer in answers]
        longest = max(len(answer) for answer in answers)
        if not prompt:
            self._refuse(example, "the prompt has no token")
            return None
        if len(prompt) + longest <= max_tokens:
            return [prompt, *answers]
        if self._config.long_rows != "truncate":
            reason = f"prompt and answer have {len(prompt) + longest} tokens, more than max_tokens={max_tokens}"
            self._problems.report(row.file, row.line, reason, self._config.long_rows, setting="data.long_rows")
            return None
        self._cut.add(id(example))
        # The prompt's beginning is cut, to no less than half of `max_tokens`; then the answers' ends, and their EOS.
        room = max(max_tokens - longest, max_tokens // 2)
        prompt = end_of_prompt(tokenizer, prompt, room) if room < len(prompt) else prompt
        return [prompt, *(answer[: max_tokens - len(prompt)] for answer in answers)]

    def _refuse(self, example: Example, reason: str, once: bool | str = False) -> None:
        self._problems.report(example.row.file, example.row.line, reason, self._config.bad_rows, once=once)

    def _show_first(self, row: Completion | Pair, texts: Mapping[str, str] | None = None, **more: str) -> None:
        """Record the first row as trained: the original text if its tokens match."""
        if not self._is_first:
            return
        texts, parts = texts or self._quarantine.first, row._asdict()
        answers = [texts[part] for part in parts if part != "prompt"]
        known = dict(zip(parts, encode_answers(self._tokenizer, texts["prompt"], answers), strict=True))
        eos = self._tokenizer.eos_id
        self._quarantine.first = {
            part: texts[part] if ids in (known[part], [*known[part], eos]) else self._tokenizer.decode(ids)
            for part, ids in parts.items()
        } | more


def load_rows(config: SupervisedConfig, data: DataConfig, tokenizer: Tokenizer, quarantine: Quarantine) -> Rows[Any]:
    loader = RowLoader(data, tokenizer, config.max_tokens, quarantine)
    if isinstance(config, DPOConfig):
        return loader.unequal_pairs() if config.of_pairs else loader.marked()
    if isinstance(config, RewardModelConfig):
        return loader.pairs() if config.separator is None else loader.steps(config.separator)
    return loader.completions()


def _ended(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """End `tokens` with one EOS, without white space after it."""
    last = max((place for place, token in enumerate(tokens) if token in tokenizer.eos_ids), default=None)
    if last is not None and not tokenizer.decode(tokens[last + 1 :]).strip():
        return tokens[: last + 1]
    return [*tokens, tokenizer.eos_id]


def num_duplicates(rows: Sequence[Any]) -> int:
    return len(rows) - len({tuple(tuple(part) for part in row) for row in rows})


def read_heldout(
    evaluation: HeldoutConfig | None, seed: int, rows: Rows[RowT], read: Callable[[DataConfig], Rows[RowT]]
) -> tuple[Rows[RowT], Rows[RowT]]:
    """(training rows, held-out rows)."""
    if evaluation is None:
        return rows, Rows(())
    if evaluation.data is not None:
        return rows, read(evaluation.data)
    assert evaluation.fraction is not None, "the cross-checks require one of both"
    return split_rows(rows, evaluation.fraction, seed)


def split_rows(rows: Rows[RowT], fraction: float, seed: int) -> tuple[Rows[RowT], Rows[RowT]]:
    """(training rows, held-out rows), each in order; rows with the same prompt stay together. Raises DataError if one is empty.

    A hash of prompt and seed orders prompts, taken up to `fraction` of the rows; one with too many rows is skipped.
    """
    by_prompt: dict[bytes, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        by_prompt[hashlib.sha256(array("q", [seed, *row[0]]).tobytes()).digest()].append(place)
    wanted = max(1, round(fraction * len(rows)))
    held: set[int] = set()
    for _, places in sorted(by_prompt.items()):
        if len(held) + len(places) <= wanted:
            held.update(places)
    if not held or len(held) == len(rows):
        raise DataError(
            f"evaluation.fraction is {fraction}, which of {len(rows)} rows with {len(by_prompt)} different prompts holds out "
            f"{len(held)}: rows of one prompt stay together, and both sides need some; name files of held-out rows with "
            "evaluation.data, or give more rows"
        )
    return rows.at(place for place in range(len(rows)) if place not in held), rows.at(sorted(held))


def describe_seen(held: Iterable[Sequence[int]], trained: Iterable[Sequence[int]]) -> list[str]:
    """A warning line if held-out prompts are also trained on."""
    ours, theirs = list(map(tuple, held)), set(map(tuple, trained))
    seen = sum(prompt in theirs for prompt in ours)
    if not seen:
        return []
    return [f"{seen} of {len(ours)} held-out prompts are trained on, too: their figures say little about other prompts"]


class Passed(NamedTuple):
    """Steps made and rows used by a run, repetitions included."""

    steps: int = 0
    rows: int = 0

    def step(self, num_rows: int) -> Passed:
        return Passed(self.steps + 1, self.rows + num_rows)


BEGINNING = Passed()


def num_batches(order: RowOrder, batch_size: int, epochs: float, max_steps: int | None, passed: Passed = BEGINNING) -> int:
    """Steps of the whole run, with those passed."""
    left = max(0, order.rows(epochs) - passed.rows)
    steps = passed.steps + math.ceil(left / batch_size)
    return steps if max_steps is None else min(steps, max_steps)


def batches(
    order: RowOrder, batch_size: int, epochs: float, max_steps: int | None, passed: Passed = BEGINNING
) -> Iterator[list[int]]:
    """Row indices of each step after `passed`. Epochs join without a gap: only the last batch may be smaller."""
    left = order.rows(epochs) - passed.rows
    epoch, first = order.locate(passed.rows)
    pending = order.epoch(epoch)[first:]
    for _ in range(passed.steps, num_batches(order, batch_size, epochs, max_steps, passed)):
        size = min(batch_size, left)
        left -= size
        while len(pending) < size:
            epoch += 1
            pending.extend(order.epoch(epoch))
        yield pending[:size]
        pending = pending[size:]
