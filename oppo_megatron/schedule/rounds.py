from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np

from oppo_megatron.columns import Ints
from oppo_megatron.layout.placements import RolePlacement


class Growth(NamedTuple):
    """A sequence in a micro-batch: `new` tokens (decoding: at most) follow `past` cached ones; the last `rows` give outputs."""

    seq_id: int
    past: int
    new: int
    rows: int = 0


Batch = Sequence[Growth]
"""The sequences that one micro-batch advances together."""


class Growths(Sequence[Growth]):
    """A micro-batch in columns: the rows of `table` [4, n] are the fields of `Growth`."""

    __slots__ = ("new", "past", "rows", "seq_ids", "table")

    def __init__(self, table: Ints):
        self.table = table
        self.seq_ids: Ints
        self.past: Ints
        self.new: Ints
        self.rows: Ints
        self.seq_ids, self.past, self.new, self.rows = table

    @classmethod
    def of(cls, batch: Batch) -> Growths:
        return batch if isinstance(batch, Growths) else cls(np.array(batch, dtype=np.int64).reshape(-1, 4).T)

    def __len__(self) -> int:
        return int(self.table.shape[1])

    def __iter__(self) -> Iterator[Growth]:
        return map(Growth, *self.table.tolist())

    @overload
    def __getitem__(self, which: int) -> Growth: ...

    @overload
    def __getitem__(self, which: slice) -> Growths: ...

    def __getitem__(self, which: int | slice) -> Growth | Growths:
        found = self.table[:, which]
        return Growths(found) if isinstance(which, slice) else Growth(*found.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Growths | tuple) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def at(self, positions: Ints | Sequence[int]) -> Growths:
        return Growths(self.table[:, positions])


def joined(batches: Iterable[Batch]) -> Growths:
    """All growths in one table."""
    return Growths(np.concatenate([np.zeros((4, 0), dtype=np.int64), *(Growths.of(batch).table for batch in batches)], axis=1))


def sums(batches: Iterable[Batch]) -> Ints:
    """New tokens and output rows of each micro-batch, [2, batches]."""
    found = [Growths.of(batch).table[2:].sum(axis=1) for batch in batches]
    totals: Ints = np.array(found, dtype=np.int64).reshape(-1, 2).T
    return totals


class Fork(NamedTuple):
    """Copy the first `tokens` cached tokens of `source` to `target`; before the round `source` has `held` cached."""

    source: int
    target: int
    tokens: int
    held: int = 0


class Forks:
    def __init__(self, forks: Iterable[Fork]):
        self._waiting: dict[int, list[Fork]] = {}
        for fork in forks:
            self._waiting.setdefault(fork.source, []).append(fork)

    @property
    def sources(self) -> list[int]:
        return list(self._waiting)

    def due(self, source: int, cached: int) -> list[Fork]:
        """Return, and forget, the forks for which `cached` tokens of `source` are enough."""
        waiting = self._waiting.pop(source, [])
        if left := [fork for fork in waiting if fork.tokens > cached]:
            self._waiting[source] = left
        return [fork for fork in waiting if fork.tokens <= cached]


@dataclass(frozen=True)
class Round:
    """Micro-batches by role and replica, in the required order; the actor prefills before decoding."""

    index: int
    steps: int  # of decoding, at most; 0: the round only scores
    decode: tuple[Sequence[Batch], ...] = ()
    prefill: Mapping[str, tuple[Sequence[Batch], ...]] = field(default_factory=dict)
    forks: Mapping[str, tuple[tuple[Fork, ...], ...]] = field(default_factory=dict)

    @property
    def decodes(self) -> bool:
        return self.steps > 0

    def forks_of(self, role: str, replica: int) -> tuple[Fork, ...]:
        own = self.forks.get(role, ())
        return own[replica] if replica < len(own) else ()


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Room in a replica's cache.  `others`: open sequences that have no part in the round."""

    slots: int
    max_length: int  # tokens of a sequence
    others: int = 0


FAN_OUT = 8
"""Most listeners to which a rank sends a chunk."""


@dataclass(frozen=True)
class Site:
    """The placements of all roles; `followers` only train; `listeners` are ranks that do not decode, and receive chunks."""

    placements: Mapping[str, RolePlacement]
    followers: tuple[int, ...] = ()

    @classmethod
    def of(cls, placements: Mapping[str, RolePlacement], trained: Mapping[str, RolePlacement]) -> Site:
        held = {rank for placement in placements.values() for rank in placement.ranks}
        training = {rank for placement in trained.values() for rank in placement.ranks}
        return cls(placements, tuple(sorted(training - held)))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.followers, *(rank for placement in self.placements.values() for rank in placement.ranks)}))

    @cached_property
    def listeners(self) -> tuple[int, ...]:
        actor = self.placements["actor"]
        return tuple(rank for rank in self.ranks if actor.coords(rank) is None)

    @cached_property
    def feeds(self) -> Mapping[int, tuple[int, ...]]:
        """Map each sender of chunks to the listeners that it sends to. Senders are actor ranks, evenly spaced (over hosts) from
        `source` on, then listeners, which get theirs from earlier senders, so no ranks wait in a cycle. The critic's ranks
        come late, because its update delays them, and those that only train last.
        """
        actor, critic = self.placements["actor"].ranks, self.placements.get("critic")
        first = actor.index(self.source)

        def delayed(rank: int) -> int:
            return 2 if rank in self.followers else int(critic is not None and critic.coords(rank) is not None)

        listeners = sorted(self.listeners, key=delayed)
        parts = [tuple(listeners[start : start + FAN_OUT]) for start in range(0, len(listeners), FAN_OUT)]
        apart = max(1, len(actor) // max(1, len(parts)))
        return dict(zip([*(*actor[first:], *actor[:first])[::apart], *listeners], parts, strict=False))

    @cached_property
    def fed_by(self) -> Mapping[int, int]:
        return {listener: rank for rank, listeners in self.feeds.items() for listener in listeners}

    @property
    def source(self) -> int:
        """The actor's first output rank, which sends chunks first and also keeps the run's journal."""
        return self.placements["actor"].output_rank()
