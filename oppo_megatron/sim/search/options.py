"""A role's layouts over a number of ranks, with their prices; those that others beat in every way are dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm

import numpy as np
import numpy.typing as npt

from oppo_megatron.config.model import TrainingLayoutConfig
from oppo_megatron.layout.layouts import Sizes
from oppo_megatron.layout.memory import Memory
from oppo_megatron.sim.search.step import Times

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Profile:
    """Whole bytes of a role over its ranks, [kind, piece]: pieces are equal runs of ranks.

    Kinds: what lasts; activations; kernels.  Of the latter two a rank has the largest of its roles' (`Memory.of_rank`).
    """

    kinds: Bytes

    @classmethod
    def of(cls, stages: Sequence[Memory]) -> Profile:
        """By pipeline stage."""
        return cls(
            np.array(
                [
                    [ceil(each.total - each.activations - each.kernels) for each in stages],
                    [ceil(each.activations) for each in stages],
                    [ceil(each.kernels) for each in stages],
                ],
                dtype=np.int64,
            )
        )

    def beside(self, other: Profile) -> Profile:
        """Both on the same ranks."""
        pieces = lcm(self.pieces, other.pieces)
        mine, theirs = self.over(pieces), other.over(pieces)
        return Profile(np.concatenate([mine[:1] + theirs[:1], np.maximum(mine[1:], theirs[1:])]))

    def over(self, pieces: int) -> Bytes:
        """[kind, piece] in so many pieces, a multiple of its own."""
        return np.repeat(self.kinds, pieces // self.pieces, axis=1)

    @property
    def pieces(self) -> int:
        return int(self.kinds.shape[1])

    @property
    def fullest(self) -> int:
        """Of the fullest rank, were the role alone."""
        return int(self.kinds.sum(axis=0).max())


@dataclass(frozen=True)
class Option:
    """One way to lay out a role over its ranks.  `number`: its place among all of the role over so many ranks."""

    number: int
    serving: Sizes
    train: TrainingLayoutConfig | None
    times: Times
    profile: Profile

    @property
    def training(self) -> Sizes | None:
        train = self.train
        if train is None:
            return None
        return Sizes(train.tp or self.serving.tp, train.pp or self.serving.pp, train.dp or self.serving.dp, train.vpp)


Weigh = Callable[[Option], Option]
"""Puts in the seconds of the move of weights, which cost more to find than the others."""


def undominated(options: Iterable[Option], weigh: Weigh, most_bytes: int) -> list[Option]:
    """The options that fit a rank alone and that no other beats or equals in serving, update with move, and every memory.

    Of equals the first stays.  Moves are weighed only where the rest does not decide.
    """
    fitting = [option for option in options if option.profile.fullest <= most_bytes]
    front = _Front(lcm(*(option.profile.pieces for option in fitting)))
    for option in sorted(fitting, key=lambda each: (each.times.total, each.number)):
        if front.beats(option):
            continue
        weighed = weigh(option)
        if weighed is option or not front.beats(weighed):
            front.add(weighed)
    return sorted(front.options(), key=lambda each: (each.times.total, each.number))


class _Front:
    """Options none of which beats another.  Their memories stand in rows of as many pieces each."""

    def __init__(self, pieces: int):
        self.pieces = pieces
        self.all: list[Option] = []
        self.kept = np.zeros(0, dtype=bool)
        self.times = np.zeros((0, 2), dtype=np.int64)
        self.memory = np.zeros((0, 3 * pieces), dtype=np.int64)

    def options(self) -> list[Option]:
        return [option for option, kept in zip(self.all, self.kept.tolist(), strict=False) if kept]

    def beats(self, option: Option) -> bool:
        rows = np.flatnonzero(self._live() & (self.times[: len(self.all)] <= _times(option)).all(axis=1))
        return bool(len(rows)) and bool((self.memory[rows] <= self._row(option)).all(axis=1).any())

    def add(self, option: Option) -> None:
        times, row = _times(option), self._row(option)
        rows = np.flatnonzero(self._live() & (self.times[: len(self.all)] >= times).all(axis=1))
        self.kept[rows[(self.memory[rows] >= row).all(axis=1)]] = False
        place = len(self.all)
        if place == len(self.kept):
            more = max(16, place)
            self.kept = np.concatenate([self.kept, np.zeros(more, dtype=bool)])
            self.times = np.concatenate([self.times, np.zeros((more, 2), dtype=np.int64)])
            self.memory = np.concatenate([self.memory, np.zeros((more, 3 * self.pieces), dtype=np.int64)])
        self.all.append(option)
        self.kept[place], self.times[place], self.memory[place] = True, times, row

    def _live(self) -> npt.NDArray[np.bool_]:
        return self.kept[: len(self.all)]

    def _row(self, option: Option) -> Bytes:
        return option.profile.over(self.pieces).reshape(-1)


def _times(option: Option) -> tuple[int, int]:
    return option.times.serving, option.times.update + option.times.weights


def with_weights(option: Option, weights_ns: int) -> Option:
    return replace(option, times=option.times._replace(weights=weights_ns))
