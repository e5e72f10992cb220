"""The chunk size, from seconds that all ranks share, and signals for delta, which contain no seconds: so ranks agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oppo_megatron.chunks import UNFINISHED, Chunk, Ints
from oppo_megatron.columns import columns_of
from oppo_megatron.config.overlap import SEARCH_STEPS
from oppo_megatron.records import Decision, Rollout

NANOSECOND = 1e-9


@dataclass(slots=True)
class DecodeLaw:
    """Fit seconds = a x steps + b x tokens. `sums`: steps^2, steps x tokens, tokens^2, steps x seconds, tokens x seconds."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, steps: int, tokens: int, seconds: float) -> None:
        """Times below a nanosecond count as 0."""
        seconds = seconds if seconds >= NANOSECOND else 0.0
        self.add_sums(steps * steps, steps * tokens, tokens * tokens, steps * seconds, tokens * seconds)

    def add_sums(self, *sums: float) -> None:
        self.sums = [old + new for old, new in zip(self.sums, sums, strict=True)]

    def seconds(self, steps: int, tokens: int) -> float:
        steps_steps, steps_tokens, tokens_tokens, steps_seconds, tokens_seconds = self.sums
        determinant = steps_steps * tokens_tokens - steps_tokens**2
        if determinant > 1e-9 * steps_steps * tokens_tokens:
            a = (steps_seconds * tokens_tokens - tokens_seconds * steps_tokens) / determinant
            b = (tokens_seconds * steps_steps - steps_seconds * steps_tokens) / determinant
            if b <= 0 < a:
                return steps_seconds / steps_steps * steps
            if a > 0:
                return a * steps + b * tokens
        rate = tokens_seconds / tokens_tokens if tokens_seconds > 0 else 1.0
        return rate * tokens


@dataclass(frozen=True, slots=True)
class StepCost:
    """`seconds` of a step up to its scores."""

    seconds: float
    steps: int
    tokens: int
    rounds: DecodeLaw = field(default_factory=DecodeLaw)


def candidates(sizes: Sequence[int], chosen: int, longest: int) -> list[int]:
    return sorted({min(size, longest) for size in [*sizes, chosen]})


class ChunkTuner:
    """Every `period` steps, tries each of `sizes` for a step; the best has the fewest seconds relative to a law of all rounds."""

    def __init__(self, sizes: Sequence[int], longest: int, period: int = SEARCH_STEPS):
        assert longest >= 1, f"the response limit must be at least 1 token, not {longest}"
        self._sizes, self._longest, self._period = sizes, longest, period
        self._chosen = min(sizes[0], longest)
        self._steps_to_search = 1
        self._tried, self._measured = list[int](), list[StepCost]()  # of a search
        self._law = DecodeLaw()

    @property
    def value(self) -> int:
        return self._tried[len(self._measured)] if self._tried else self._chosen

    def observe(self, step: int, cost: StepCost) -> Decision:
        assert math.isfinite(cost.seconds) and cost.seconds >= 0 and cost.tokens >= 0, f"step {step}: {cost}"
        before = self.value
        reason = self._advance(cost) if len(self._sizes) > 1 else f"chunk is fixed at {self._chosen}"
        return Decision(self.value, f"step {step}: {reason}", self.value != before)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._chosen, "steps_to_search": 1 if self._tried else self._steps_to_search}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(self._sizes) > 1:
            self._chosen = min(state["value"], self._longest)
        self._steps_to_search = state["steps_to_search"]
        self._tried, self._measured = [], []

    def _advance(self, cost: StepCost) -> str:
        self._steps_to_search -= 1
        self._law.add_sums(*cost.rounds.sums)
        if self._tried:
            return self._measure(cost)
        if self._steps_to_search > 0:
            return f"chunk stays {self._chosen}, the next search starts in {self._steps_to_search} steps"
        self._steps_to_search = self._period
        sizes = candidates(self._sizes, self._chosen, self._longest)
        if len(sizes) == 1:
            return f"chunk stays {self._chosen}: no other candidate within the response limit of {self._longest}"
        self._tried = sizes
        return f"search over chunks {sizes} starts with {self.value}"

    def _measure(self, cost: StepCost) -> str:
        if cost.tokens == 0:
            return f"nothing was decoded, chunk {self.value} is tried again"
        self._measured.append(cost)
        if len(self._measured) < len(self._tried):
            return f"search tries chunk {self.value} ({len(self._measured)} of {len(self._tried)} steps measured)"
        costs = dict(zip(self._tried, self._measured, strict=True))
        ratios = {size: each.seconds / self._law.seconds(each.steps, each.tokens) for size, each in costs.items()}
        self._chosen = min(ratios, key=lambda size: (ratios[size], size))
        self._tried, self._measured, self._law = [], [], DecodeLaw()  # the next search uses the measurements until then
        figures = ", ".join(f"{size}: {ratio:.4g}" for size, ratio in ratios.items())
        return f"chunk {self._chosen} is the fastest (seconds until scored, relative to decoding such work: {figures})"


class Occupancy:
    """Measures how full decode batches are; a row of n tokens ran in the n steps before its finish or the chunk's end."""

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
