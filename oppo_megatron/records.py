"""Plain records: prompts and rollouts.

*offset* counts response tokens; *clock* counts decode steps since the run began, each of one token per running sequence.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from oppo_megatron.chunks import FREE, ChunkRow, ChunkRows, FinishReason

TIE = 2.0**-20
"""Share of the largest score by which equal ones may differ: eight float32 roundings, as between micro-batches."""


class TypedText(str):
    """Text of a time or identifier that a typed file (Parquet) holds as such: neither a prompt nor an answer."""

    __slots__ = ()

    @property
    def fault(self) -> str:
        return f"is a time or an identifier ({self:.40}), and not text; name another column, or write it as text"


def field_at(fields: Mapping[str, Any], name: str) -> Any:
    """Column `name`; `a.b` is also key `b` of column `a`.  Raises KeyError."""
    if name in fields:
        return fields[name]
    column, _, rest = name.partition(".")
    if not rest or not isinstance(fields.get(column), Mapping):
        raise KeyError(name)
    return field_at(fields[column], rest)


def field_names(fields: Mapping[str, Any]) -> Iterator[str]:
    """Names that `field_at` accepts, except non-empty objects."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{below}" for below in field_names(value))
        else:
            yield name


def nearest_field(wanted: Iterable[str], names: Sequence[str]) -> str | None:
    """Name most similar to one of `wanted`, also by its last key; or None."""
    by_key = {name.rpartition(".")[2]: name for name in reversed(names)}
    for name in wanted:
        if found := difflib.get_close_matches(name, [*names, *by_key], n=1):
            return by_key.get(found[0], found[0])
    return None


class Source(NamedTuple):
    """An entry of `data.path`; all rows of its files have its weight."""

    path: str = ""
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Prompt:
    seq_id: int  # unique over the run: the position in the stream of prompts, over all epochs
    row: int  # of the data set
    text: str
    tokens: tuple[int, ...]
    fields: dict[str, Any] = field(default_factory=dict)  # the row's other columns, for verifiers
    place: str = field(default="", compare=False)  # file:line, for messages
    source: Source = field(default=Source(), compare=False)


@dataclass(frozen=True)
class Members:
    """Sequence ids of a prompt's responses: `trained`, then a `greedy` one as their baseline."""

    trained: int = 1
    greedy: bool = False

    @property
    def size(self) -> int:
        return self.trained + self.greedy

    def is_greedy(self, seq_id: int) -> bool:
        return self.greedy and seq_id % self.size == self.trained

    def of_groups(self, seq_ids: Iterable[int]) -> list[int]:
        groups = dict.fromkeys(seq_id // self.size for seq_id in seq_ids)
        return [group * self.size + place for group in groups for place in range(self.size)]

    def to_train(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        return [rollout for rollout in rollouts if not self.is_greedy(rollout.seq_id)] if self.greedy else rollouts


ALONE = Members()


Lists = tuple[list[int], list[float], list[float], list[int], list[str]]
"""Tokens, log-probs, sampling log-probs, versions, routes (of no or all tokens)."""


class Rollout:
    """A prompt's growing response; `logprobs`: full distribution; `sampling_logprobs`: after top-k / top-p."""

    __slots__ = (
        "_lists", "_position", "_recorded", "admission", "deferrals", "finish_clock", "finish_reason", "prompt",
    )  # fmt: skip

    def __init__(
        self,
        prompt: Prompt,
        admission: int,
        tokens: list[int] | None = None,
        logprobs: list[float] | None = None,
        sampling_logprobs: list[float] | None = None,
        versions: list[int] | None = None,
        deferrals: int = 0,
        finish_clock: int | None = None,
        finish_reason: FinishReason | None = None,
        recorded: Sequence[ChunkRows] = (),
        routes: list[str] | None = None,
    ):
        """`recorded` is followed from its current end."""
        self.prompt, self.admission, self.deferrals = prompt, admission, deferrals
        self.finish_clock, self.finish_reason = finish_clock, finish_reason
        self._lists: Lists | None = None  # until one is needed
        if any(each is not None for each in (tokens, logprobs, sampling_logprobs, versions)):
            self._lists = (tokens or [], logprobs or [], sampling_logprobs or [], versions or [], routes or [])
        self._recorded, self._position = recorded, len(recorded)  # rows from there on are not in the lists yet

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rollout) and (self.prompt, self._facts()) == (other.prompt, other._facts())

    def __repr__(self) -> str:
        return f"Rollout({self.prompt!r}, {', '.join(map(repr, self._facts()))})"

    @property
    def tokens(self) -> list[int]:
        return self._joined()[0]

    @property
    def logprobs(self) -> list[float]:
        return self._joined()[1]

    @property
    def sampling_logprobs(self) -> list[float]:
        return self._joined()[2]

    @property
    def versions(self) -> list[int]:
        return self._joined()[3]

    @property
    def routes(self) -> list[str]:
        return self._joined()[4]

    @property
    def seq_id(self) -> int:
        return self.prompt.seq_id

    @property
    def finished(self) -> bool:
        return self.finish_clock is not None

    @property
    def num_response_tokens(self) -> int:
        """`len(tokens)`, without joining them."""
        joined = 0 if self._lists is None else len(self._lists[0])
        if self._position == len(self._recorded):
            return joined
        return joined + sum(int(rows.counts[place]) for rows, place in self._pending())

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.tokens) + self.num_response_tokens

    def extend(self, row: ChunkRow) -> None:
        self._append(self._joined(), row)
        self.finish_clock, self.finish_reason = row.finish_clock, row.finish_reason

    def rewrite(self, lists: Lists, finish_clock: int | None, finish_reason: FinishReason | None) -> None:
        """Replace the response."""
        self._lists, self._position = lists, len(self._recorded)
        self.finish_clock, self.finish_reason = finish_clock, finish_reason

    def follow(self, recorded: Sequence[ChunkRows]) -> None:
        """Count rows later added to `recorded`; the caller sets `finish_clock`."""
        if self._position < len(self._recorded):
            self._joined()
        self._recorded, self._position = recorded, len(recorded)

    def defer(self, recorded: Sequence[ChunkRows], dropped: int) -> None:
        """Defer to a later batch; `recorded` has lost `dropped` chunks at its front."""
        self.deferrals += 1
        self._recorded, self._position = recorded, max(0, self._position - dropped)

    def _pending(self) -> list[tuple[ChunkRows, int]]:
        if self._position == len(self._recorded):
            return []
        found = [(rows, rows.place(self.seq_id)) for rows in self._recorded[self._position :]]
        return [(rows, place) for rows, place in found if place is not None]

    def _joined(self) -> Lists:
        pending, self._position = self._pending(), len(self._recorded)
        if self._lists is None:
            self._lists = [], [], [], [], []
        for rows, place in pending:
            self._append(self._lists, rows[place])
        return self._lists

    @staticmethod
    def _append(lists: Lists, row: ChunkRow) -> None:
        tokens, logprobs, sampling_logprobs, versions, routes = lists
        if routes or row.routes:  # older tokens of a checkpoint may have none
            routes += [FREE] * (len(tokens) - len(routes)) + (row.routes or [FREE] * len(row.tokens))
        tokens += row.tokens
        logprobs += row.logprobs
        sampling_logprobs += row.sampling_logprobs
        versions += [row.version] * len(row.tokens)

    def _facts(self) -> tuple[object, ...]:
        return self.admission, *self._joined(), self.deferrals, self.finish_clock, self.finish_reason


@dataclass(frozen=True, slots=True)
class StepSignals:
    """Signals that control delta, the same on every rank."""

    reward_mean: float  # of the batch's scores, as they are trained on
    tail_waste: float  # share of the decode batch that ran empty: 1 - tokens / (decode steps x most sequences at once)
    ess: float  # effective sample size that the actor last measured, as a share of its tokens; 1 in the first step
    length_gap: float  # share by which the batch's responses are shorter than all that were submitted; below 0: longer


@dataclass(frozen=True, slots=True)
class Decision:
    value: int
    reason: str
    changed: bool
