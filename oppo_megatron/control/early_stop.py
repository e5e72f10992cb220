"""Ends a run whose held-out metric no longer improves.  Every rank observes the same values, and decides the same."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from oppo_megatron.config.evaluation import EarlyStopConfig


class Best(NamedTuple):
    """The best value so far, and the step after which it was measured."""

    step: int
    value: float


class EarlyStop:
    """Takes a value after each evaluation; `due` once `patience` of them in a row were no better than the best.

    NaN is not better.
    """

    def __init__(self, config: EarlyStopConfig):
        self.config = config
        self.best: Best | None = None
        self.worse = 0
        self.last: Best | None = None

    @property
    def due(self) -> bool:
        """True if the run is to end."""
        return self.worse >= self.config.patience

    def observe(self, step: int, value: float) -> bool:
        """The metric after `step` steps; whether it is the best so far."""
        self.last = Best(step, value)
        gain = math.inf if self.best is None else self.config.standard.gain(value, self.best.value)
        better = not math.isnan(value) and gain > 0
        if better:
            self.best, self.worse = self.last, 0
        else:
            self.worse += 1
        return better

    def describe(self) -> str:
        """Why the run ends."""
        assert self.last is not None
        best = "never a number" if self.best is None else f"best {self.best.value:.4g} at step {self.best.step}"
        metric = self.config.standard.metric
        return (
            f"stopped early at step {self.last.step}: {metric} {self.last.value:.4g}, no better in {self.worse} "
            f"evaluations; {best}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state, in plain JSON types."""
        return {"best": self.best, "worse": self.worse, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.best, self.last = (None if state[name] is None else Best(*state[name]) for name in ("best", "last"))
        self.worse = state["worse"]
