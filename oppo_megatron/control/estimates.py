"""Held-out metrics and early stopping; a prompt counts once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from oppo_megatron.config.evaluation import EarlyStopConfig

Figures = dict[str, tuple[float, float | None]]
"""Mean and standard error of each metric."""


@dataclass(frozen=True)
class Estimate:
    """`error`: standard error of `mean` over `n` prompts; None for one prompt."""

    mean: float
    error: float | None
    n: int


def estimate(by_prompt: Mapping[int, Sequence[float]]) -> Estimate:
    return _of([fmean(values) for values in by_prompt.values()])


def paired_difference(before: Mapping[int, Sequence[float]], after: Mapping[int, Sequence[float]]) -> Estimate:
    """Estimate `after` - `before` on the same prompts, so that their difficulty cancels out."""
    assert before.keys() == after.keys(), "both have answered the same prompts"
    return _of([fmean(after[prompt]) - fmean(before[prompt]) for prompt in before])


def _of(means: Sequence[float]) -> Estimate:
    error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return Estimate(fmean(means), error, len(means))


def moments_of(table: Sequence[Sequence[float]], width: int) -> list[float]:
    """Row count, then by column the sums of values, of products with the first column, of squares."""
    sums, by_weight, squares = [0.0] * width, [0.0] * width, [0.0] * width
    for row in table:
        for column, value in enumerate(row):
            sums[column] += value
            by_weight[column] += row[0] * value
            squares[column] += value * value
    return [float(len(table)), *sums, *by_weight, *squares]


def ratios(moments: Sequence[float], width: int) -> list[tuple[float, float | None]]:
    """Mean per unit of the first column, and its standard error, of each other column: for v and weights w over n rows, with m =
    sum v / sum w, it is sqrt(n / (n - 1) * sum (v - m w)^2) / sum w.
    """
    n, parts = moments[0], [moments[1 + k * width : 1 + (k + 1) * width] for k in range(3)]
    sums, by_weight, squares = parts
    weight, found = sums[0], list[tuple[float, float | None]]()
    for column in range(1, width):
        mean = sums[column] / weight
        spread = max(0.0, squares[column] - 2 * mean * by_weight[column] + mean * mean * squares[0])
        found.append((mean, math.sqrt(n / (n - 1) * spread) / weight if n > 1 else None))
    return found


class Best(NamedTuple):
    step: int
    value: float


class EarlyStop:
    """`due` after `patience` values in a row without a new best."""

    def __init__(self, config: EarlyStopConfig):
        self.config = config
        self.best: Best | None = None
        self.worse = 0
        self.last: Best | None = None

    @property
    def due(self) -> bool:
        return self.worse >= self.config.patience

    def observe(self, step: int, value: float) -> bool:
        self.last = Best(step, value)
        gain = math.inf if self.best is None else self.config.standard.gain(value, self.best.value)
        better = not math.isnan(value) and gain > 0
        if better:
            self.best, self.worse = self.last, 0
        else:
            self.worse += 1
        return better

    def describe(self) -> str:
        assert self.last is not None
        best = "never a number" if self.best is None else f"best {self.best.value:.4g} at step {self.best.step}"
        metric = self.config.standard.metric
        return (
            f"stopped early at step {self.last.step}: {metric} {self.last.value:.4g}, no better in {self.worse} "
            f"evaluations; {best}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "worse": self.worse, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.last = (None if state[name] is None else Best(*state[name]) for name in ("best", "last"))
        self.worse = state["worse"]
