"""Signals for delta, without seconds, so that ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from oppo_megatron.chunks import UNFINISHED, Chunk, Ints
from oppo_megatron.columns import columns_of
from oppo_megatron.records import Rollout


class Occupancy:
    """A row of n tokens ran in the n decode steps before its finish or the chunk's end."""

    def __init__(self, clock: int):
        self._clock = clock
        self.num_steps = self._num_tokens = self._width = 0

    def record(self, chunk: Chunk, since: int | None = None) -> None:
        """`since`: the chunk's start, if the clock advanced without decoding."""
        rows = chunk.rows
        ends = np.where(rows.finish_clocks == UNFINISHED, chunk.clock, rows.finish_clocks)
        self.num_steps += chunk.clock - (self._clock if since is None else since)
        self._num_tokens += rows.num_tokens
        self._width = max(self._width, _most_running(rows.counts, ends))
        self._clock = chunk.clock

    def state_dict(self) -> dict[str, Any]:
        return {"clock": self._clock, "steps": self.num_steps, "tokens": self._num_tokens, "width": self._width}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Occupancy:
        occupancy = cls(state["clock"])
        occupancy.num_steps, occupancy._num_tokens = state["steps"], state["tokens"]
        occupancy._width = state["width"]
        return occupancy

    @property
    def tail_waste(self) -> float:
        """1 - tokens / (decode steps x most sequences running at once)."""
        return 1 - self._num_tokens / (self.num_steps * self._width) if self._num_tokens else 0.0


def _most_running(counts: Ints, ends: Ints) -> int:
    if not len(counts):
        return 0
    starts = ends - counts
    first = starts.min()
    begun, ended = np.bincount(starts - first, minlength=ends.max() - first + 1), np.bincount(ends - first)
    return int(np.cumsum(begun - ended).max())


def length_gap(trained: Sequence[Rollout], carried: Sequence[Rollout]) -> float:
    """1 - mean trained / mean submitted length; a lower bound: carried responses still grow."""
    lengths: list[int] = columns_of(trained).response_tokens.tolist()
    submitted: list[int] = lengths + columns_of(carried).response_tokens.tolist()
    return 1 - (sum(lengths) / len(lengths)) / (sum(submitted) / len(submitted))


def group_length_gap(lengths: Ints, group_size: int) -> float | None:
    """Mean of 1 - mean / longest length over groups."""
    if group_size == 1:
        return None
    lengths_GN = lengths.reshape(-1, group_size)
    return float(np.mean(1 - lengths_GN.mean(1) / lengths_GN.max(1)))
