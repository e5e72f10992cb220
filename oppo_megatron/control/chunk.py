"""Tuner of the chunk size: tries a few sizes on different steps and keeps the one with the least seconds per token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from oppo_megatron.config.overlap import ChunkConfig
from oppo_megatron.records import Decision


@dataclass(slots=True)
class Trials:
    """What the steps spent on one candidate cost."""

    seconds: float = 0.0
    tokens: int = 0

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens


@dataclass(slots=True)
class Search:
    """One search under way.  Candidates take turns, so that a drift of response lengths meets all of them alike."""

    candidates: list[int]
    num_steps: int
    num_measured: int = 0
    costs: dict[int, Trials] = field(default_factory=dict)

    @property
    def current(self) -> int:
        """The candidate whose turn it is."""
        return self.candidates[self.num_measured % len(self.candidates)]

    def measure(self, seconds: float, tokens: int) -> None:
        cost = self.costs.setdefault(self.current, Trials())
        cost.seconds += seconds
        cost.tokens += tokens
        self.num_measured += 1


def candidates(config: ChunkConfig, settled: int, longest: int) -> list[int]:
    """The sizes that a search compares: those configured and the one in force, none beyond the response limit."""
    return sorted({min(size, longest) for size in [*config.candidates, settled]})


def first_settled_step(config: ChunkConfig, longest: int) -> int:
    """The step, from 1, that is the first to have the size which the first search has found."""
    count = len(candidates(config, min(config.tokens, longest), longest))
    return 2 + count * config.trials if config.adaptive and count > 1 else 1


class ChunkTuner:
    """Sets the chunk size (decode steps a round) from measured steps; it reads no clock of its own.

    ::

        settled --(1 step after the start, then every `period` steps)--> searching
        searching --(every candidate measured on `trials` steps)--> settled

    The first step only warms up, so that one-time costs are not taken for a candidate's.  `longest` is the response
    limit in tokens: a chunk cannot be longer.  A step that decoded nothing says nothing: its candidate is tried again.
    """

    def __init__(self, config: ChunkConfig, longest: int):
        assert longest >= 1, f"the response limit must be at least 1 token, not {longest}"
        self._config = config
        self._longest = longest
        self._settled = min(config.tokens, longest)
        self._steps_to_search = 1
        self._search: Search | None = None

    @property
    def value(self) -> int:
        """Chunk size of the coming step, in tokens of each sequence."""
        return self._search.current if self._search else self._settled

    def observe(self, step: int, seconds: float, tokens: int) -> Decision:
        """Take what `step` cost at `value` (seconds of the rollout, tokens decoded) and decide for the next step."""
        assert math.isfinite(seconds) and seconds >= 0 and tokens >= 0, f"step {step}: {seconds} s for {tokens} tokens"
        before = self.value
        reason = self._advance(seconds, tokens) if self._config.adaptive else f"chunk is fixed at {self._settled}"
        return Decision(self.value, f"step {step}: {reason}", self.value != before)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in plain JSON types.

        A search under way is not kept: it starts again after the first step of the resumed run, which warms up again.
        """
        return {"value": self._settled, "steps_to_search": 1 if self._search else self._steps_to_search}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; a chunk size that is fixed by the configuration stays as configured."""
        if self._config.adaptive:
            self._settled = min(state["value"], self._longest)
        self._steps_to_search = state["steps_to_search"]
        self._search = None

    def _advance(self, seconds: float, tokens: int) -> str:
        self._steps_to_search -= 1
        if self._search is not None:
            return self._measure(self._search, seconds, tokens)
        if self._steps_to_search > 0:
            return f"chunk stays {self._settled}, the next search starts in {self._steps_to_search} steps"
        return self._start()

    def _start(self) -> str:
        self._steps_to_search = self._config.period
        sizes = candidates(self._config, self._settled, self._longest)
        if len(sizes) == 1:
            return f"chunk stays {self._settled}: no other candidate within the response limit of {self._longest}"
        self._search = Search(sizes, num_steps=len(sizes) * self._config.trials)
        return f"search over chunks {sizes} starts with {self._search.current}"

    def _measure(self, search: Search, seconds: float, tokens: int) -> str:
        if tokens == 0:
            return f"nothing was decoded, chunk {search.current} is tried again"
        search.measure(seconds, tokens)
        if search.num_measured < search.num_steps:
            return f"search tries chunk {search.current} ({search.num_measured} of {search.num_steps} steps measured)"
        self._settled = min(search.candidates, key=lambda c: (search.costs[c].seconds_per_token, c))
        self._search = None
        figures = ", ".join(f"{c}: {1e3 * search.costs[c].seconds_per_token:.4g} ms/token" for c in search.candidates)
        return f"chunk {self._settled} is the fastest ({figures})"
