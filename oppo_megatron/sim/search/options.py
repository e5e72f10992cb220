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
    front = _Front()
    for option in sorted(options, key=lambda each: (each.times.total, each.number)):
        if option.profile.fullest > most_bytes or front.beats(option):
            continue
        weighed = weigh(option)
        if weighed is option or not front.beats(weighed):
            front.add(weighed)
    return sorted(front.options, key=lambda each: (each.times.total, each.number))


class _Front:
    """Options none of which beats another."""

    def __init__(self) -> None:
        self.options: list[Option] = []

    def beats(self, option: Option) -> bool:
        return any(_beats(each, option) for each in self.options)

    def add(self, option: Option) -> None:
        self.options = [each for each in self.options if not _beats(option, each)] + [option]


def _beats(one: Option, other: Option) -> bool:
    if one.times.serving > other.times.serving:
        return False
    if one.times.update + one.times.weights > other.times.update + other.times.weights:
        return False
    pieces = lcm(one.profile.pieces, other.profile.pieces)
    return bool((one.profile.over(pieces) <= other.profile.over(pieces)).all())


def with_weights(option: Option, weights_ns: int) -> Option:
    return replace(option, times=option.times._replace(weights=weights_ns))
