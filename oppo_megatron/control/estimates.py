"""Means over prompts with their standard errors.  Pure.

Several responses to a prompt are not independent of each other, so a prompt counts once, with the mean over its responses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True)
class Estimate:
    """`error` is the standard error of `mean` over `n` prompts; None of a single prompt, of which nothing is known."""

    mean: float
    error: float | None
    n: int


def estimate(by_prompt: Mapping[int, Sequence[float]]) -> Estimate:
    """The mean over prompts of the mean over each prompt's responses."""
    means = [fmean(values) for values in by_prompt.values()]
    return _of(means)


def paired_difference(before: Mapping[int, Sequence[float]], after: Mapping[int, Sequence[float]]) -> Estimate:
    """Of `after` - `before` on the same prompts: how hard a prompt is falls out, so it is surer than two means apart."""
    assert before.keys() == after.keys(), "both have answered the same prompts"
    return _of([fmean(after[prompt]) - fmean(before[prompt]) for prompt in before])


def _of(means: Sequence[float]) -> Estimate:
    error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return Estimate(fmean(means), error, len(means))
