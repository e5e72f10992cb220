"""Price of a step in nanoseconds, from its phases (docs/planner.md, end of "The laws").

The search needs a price that never falls if a phase takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from oppo_megatron.sim.search.blocks import Blocks


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class Times(NamedTuple):
    """Nanoseconds of a role's phases, numbers or arrays."""

    serving: Any
    update: Any = 0
    weights: Any = 0

    @property
    def total(self) -> Any:
        return self.serving + self.update + self.weights


@dataclass(frozen=True)
class Mode:
    """`streams`: scoring during decoding; `hides_critic`: its update during the next step's decoding; `last_share` of scoring
    after decoding.
    """

    streams: bool
    hides_critic: bool
    last_share: float = 1.0


@dataclass(frozen=True)
class StepRule:
    """Price of roles (the actor first) in these blocks."""

    roles: tuple[str, ...]
    blocks: Blocks
    mode: Mode

    def step_ns(self, times: Sequence[Times]) -> Any:
        """Nanoseconds of a step; an array if a time is one."""
        actor, mode = times[0], self.mode
        if not mode.streams:
            return actor.serving + self._scoring_ns(times, 1.0) + self._updates_ns(times)
        after = actor.update + actor.weights if mode.hides_critic else self._updates_ns(times)
        path = actor.serving + self._scoring_ns(times, mode.last_share) + after
        return _largest(path, *(sum(times[other].total for other in others) for others in self._over))

    def _scoring_ns(self, times: Sequence[Times], share: float) -> Any:
        """Until all have scored: each starts after those before it on its ranks."""
        ends: list[Any] = []
        for role in range(1, len(times)):
            start = _largest(0, *(ends[other - 1] for other in self._overlaps[role] if 0 < other < role))
            ends.append(start + _part(times[role].serving, share))
        return _largest(0, *ends)

    def _updates_ns(self, times: Sequence[Times]) -> Any:
        alone = times[0].update + times[0].weights
        others = [
            each.update + each.weights + (alone if role in self._overlaps[0] else 0) for role, each in enumerate(times) if role
        ]
        return _largest(alone, *others)

    @cached_property
    def _overlaps(self) -> tuple[frozenset[int], ...]:
        return tuple(
            frozenset(number for number, other in enumerate(self.blocks) if block.overlaps(other)) for block in self.blocks
        )

    @cached_property
    def _over(self) -> tuple[tuple[int, ...], ...]:
        """Roles on all of each role's ranks."""
        return tuple(tuple(number for number, other in enumerate(self.blocks) if other.contains(block)) for block in self.blocks)


def _largest(*values: Any) -> Any:
    if any(isinstance(value, np.ndarray) for value in values):
        return reduce(np.maximum, values)
    return max(values)


def _part(nanosecs: Any, share: float) -> Any:
    if share == 1.0:
        return nanosecs
    return np.ceil(nanosecs * share).astype(np.int64) if isinstance(nanosecs, np.ndarray) else ceil(nanosecs * share)
