"""Signals for controlling delta, from facts that every rank records alike: chunks and responses, never seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from oppo_megatron.records import Chunk, ChunkRow, Rollout


class Occupancy:
    """How full the decode batch was in the rollout phase of a step, told from its chunks.

    A sequence gets one token in each decode step in which it runs, so a row of n tokens ran in the n steps up to its finish
    clock, or up to the chunk's clock where it goes on.  What was carried, admitted late or cut off needs no care.
    """

    def __init__(self, clock: int):
        """`clock` is the logical clock at which the phase begins."""
        self._clock = clock
        self._num_steps = self._num_tokens = self._width = 0

    def record(self, chunk: Chunk) -> None:
        """The next chunk of the phase."""
        self._num_steps += chunk.clock - self._clock
        self._num_tokens += sum(len(row.tokens) for row in chunk.rows)
        self._width = max(self._width, _most_running(chunk.rows, chunk.clock))
        self._clock = chunk.clock

    def state_dict(self) -> dict[str, Any]:
        """Within a phase, in plain JSON types."""
        return {"clock": self._clock, "steps": self._num_steps, "tokens": self._num_tokens, "width": self._width}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Occupancy:
        """The phase goes on."""
        occupancy = cls(state["clock"])
        occupancy._num_steps, occupancy._num_tokens = state["steps"], state["tokens"]
        occupancy._width = state["width"]
        return occupancy

    @property
    def tail_waste(self) -> float:
        """1 - tokens / (decode steps x the most sequences that ran at once); 0 where nothing was decoded."""
        return 1 - self._num_tokens / (self._num_steps * self._width) if self._num_tokens else 0.0


def _most_running(rows: Sequence[ChunkRow], clock: int) -> int:
    changes: Counter[int] = Counter()
    for row in rows:
        end = clock if row.finish_clock is None else row.finish_clock
        changes[end - len(row.tokens)] += 1
        changes[end] -= 1
    return max(accumulate(changes[at] for at in sorted(changes)), default=0)


def length_gap(trained: Sequence[Rollout], carried: Sequence[Rollout]) -> float:
    """Share by which the trained responses are shorter than all that were submitted, on average; below 0: longer.

    A carried response counts with its tokens so far, so the gap is a lower bound while any is unfinished.
    """
    lengths = [len(rollout.tokens) for rollout in trained]
    submitted = lengths + [len(rollout.tokens) for rollout in carried]
    return 1 - (sum(lengths) / len(lengths)) / (sum(submitted) / len(submitted))
