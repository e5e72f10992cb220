"""Seconds of a step from those of its phases: the closed form that the search goes by, in whole nanoseconds.

Sequential rounds are calls that follow each other (`sim/events/dataflow.py` plays the same): decoding, scoring in the order of
roles, updates, moves of weights; calls on ranks apart run side by side.  Where scoring is streamed beside decoding, no step is
shorter than

    path   decoding, the last chunk's scoring, the actor's update and its move of weights (the critic's, too, if waited for)
    busy   all that one rank has to do

and the larger of both is taken.  It falls with no phase, which is what pruning rests on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from oppo_megatron.sim.search.homes import Homes


class Times(NamedTuple):
    """Nanoseconds of a role's phases: prompts and decoding (the actor) or scoring, the update, and the move of weights.

    Each a whole number; or, of many options at once, an array of them.
    """

    serving: Any
    update: Any = 0
    weights: Any = 0

    @property
    def total(self) -> Any:
        return self.serving + self.update + self.weights


@dataclass(frozen=True)
class Mode:
    """How a step's phases follow each other.

    `streams`: scoring beside decoding; `hides_critic`: its update beside the next step's; `last_share`: of scoring that is left
    when decoding ends, the last chunk's share of all decode steps.
    """

    streams: bool
    hides_critic: bool
    last_share: float = 1.0


class Parts(NamedTuple):
    """A step in nanoseconds as the actor's ranks see it; `idle` is what they wait for other ranks that are busier."""

    decode: int
    scoring: int
    update: int
    critic: int
    weights: int
    idle: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class StepRule:
    """The closed form for roles in these homes.  `roles`: the actor first; `trained`: those that are updated."""

    roles: tuple[str, ...]
    homes: Homes
    mode: Mode

    def step_ns(self, times: Sequence[Times]) -> Any:
        """Of a step whose roles take so long; an array where one of the times is."""
        if not self.mode.streams:
            return times[0].serving + self._scoring_ns(times, 1.0) + self._updates_ns(times)
        return _largest(self._path_ns(times), *self._busy(times))

    def parts(self, times: Sequence[Times]) -> Parts:
        """What the seconds of `step_ns` are spent with."""
        actor, mode = times[0], self.mode
        alone = actor.update + actor.weights
        scoring = self._scoring_ns(times, mode.last_share if mode.streams else 1.0)
        critic = 0 if mode.streams and mode.hides_critic else self._updates_ns(times) - alone
        known = actor.serving + scoring + alone + critic
        return Parts(actor.serving, scoring, actor.update, critic, actor.weights, self.step_ns(times) - known)

    def busiest(self, times: Sequence[Times]) -> tuple[str, int]:
        """The role on whose ranks most is to be done, and how much."""
        busy = self._busy(times)
        most = max(range(len(busy)), key=lambda role: (busy[role], -role))
        return self.roles[most], busy[most]

    def _path_ns(self, times: Sequence[Times]) -> Any:
        actor = times[0]
        after = actor.update + actor.weights if self.mode.hides_critic else self._updates_ns(times)
        return actor.serving + self._scoring_ns(times, self.mode.last_share) + after

    def _scoring_ns(self, times: Sequence[Times], share: float) -> Any:
        """Until all have scored: each role when those before it have left its ranks."""
        ends: list[Any] = []
        for role in range(1, len(times)):
            start = _largest(0, *(ends[other - 1] for other in self._meets[role] if 0 < other < role))
            ends.append(start + _part(times[role].serving, share))
        return _largest(0, *ends)

    def _updates_ns(self, times: Sequence[Times]) -> Any:
        """The actor's update, then those on its ranks; weights move when both have left the ranks."""
        actor = times[0]
        alone = actor.update + actor.weights
        others = [
            each.update + each.weights + (alone if role in self._meets[0] else 0)
            for role, each in enumerate(times)
            if role
        ]
        return _largest(alone, *others)

    def _busy(self, times: Sequence[Times]) -> list[Any]:
        return [sum(times[other].total for other in others) for others in self._over]

    @cached_property
    def _meets(self) -> tuple[frozenset[int], ...]:
        return tuple(
            frozenset(number for number, other in enumerate(self.homes) if home.meets(other)) for home in self.homes
        )

    @cached_property
    def _over(self) -> tuple[tuple[int, ...], ...]:
        """By role, those which all of its ranks hold."""
        return tuple(
            tuple(number for number, other in enumerate(self.homes) if other.holds(home)) for home in self.homes
        )


def _largest(*values: Any) -> Any:
    if any(isinstance(value, np.ndarray) for value in values):
        return reduce(np.maximum, values)
    return max(values)


def _part(nanosecs: Any, share: float) -> Any:
    """A share of them, rounded up."""
    if share == 1.0:
        return nanosecs
    return np.ceil(nanosecs * share).astype(np.int64) if isinstance(nanosecs, np.ndarray) else ceil(nanosecs * share)
