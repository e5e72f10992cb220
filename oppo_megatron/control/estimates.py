"""Means over prompts with their standard errors.  Pure.

Several responses to a prompt are not independent of each other, so a prompt counts once, with the mean over its responses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

Figures = dict[str, tuple[float, float | None]]
"""Mean and standard error of each metric."""


@dataclass(frozen=True)
class Estimate:
    """`error` is the standard error of `mean` over `n` prompts; None for a single prompt."""

    mean: float
    error: float | None
    n: int


def estimate(by_prompt: Mapping[int, Sequence[float]]) -> Estimate:
    """The mean over prompts of the mean over each prompt's responses."""
    means = [fmean(values) for values in by_prompt.values()]
    return _of(means)


def paired_difference(before: Mapping[int, Sequence[float]], after: Mapping[int, Sequence[float]]) -> Estimate:
    """The estimate of `after` - `before` on the same prompts; their difficulty cancels out, so it is surer than two means."""
    assert before.keys() == after.keys(), "both have answered the same prompts"
    return _of([fmean(after[prompt]) - fmean(before[prompt]) for prompt in before])


def _of(means: Sequence[float]) -> Estimate:
    error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return Estimate(fmean(means), error, len(means))


def moments_of(table: Sequence[Sequence[float]], width: int) -> list[float]:
    """Sums over rows of `width` numbers that can be added over ranks: the row count, the sums, and the sums of the products
    with the first number and with themselves.
    """
    sums, by_weight, squares = [0.0] * width, [0.0] * width, [0.0] * width
    for row in table:
        for column, value in enumerate(row):
            sums[column] += value
            by_weight[column] += row[0] * value
            squares[column] += value * value
    return [float(len(table)), *sums, *by_weight, *squares]


def ratios(moments: Sequence[float], width: int) -> list[tuple[float, float | None]]:
    """For each number after the first: its mean per unit of the first (the row's weight), and the mean's standard error.

    Rows are the sampled units.  The ratio estimator's error, of sums v and weights w over n rows with m = sum v / sum w, is
    sqrt(n / (n - 1) * sum (v - m w)^2) / sum w; None for a single row.
    """
    n, parts = moments[0], [moments[1 + k * width : 1 + (k + 1) * width] for k in range(3)]
    sums, by_weight, squares = parts
    weight, found = sums[0], list[tuple[float, float | None]]()
    for column in range(1, width):
        mean = sums[column] / weight
        spread = max(0.0, squares[column] - 2 * mean * by_weight[column] + mean * mean * squares[0])
        found.append((mean, math.sqrt(n / (n - 1) * spread) / weight if n > 1 else None))
    return found
