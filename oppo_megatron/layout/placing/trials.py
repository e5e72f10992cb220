"""Measuring placements in turn, and again those that are close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from oppo_megatron.errors import PlacementError
from oppo_megatron.layout.placing.candidates import Candidate
from oppo_megatron.layout.placing.probe import Run

CLOSE = 0.05
"""A placement whose time is within this share of the least is measured again."""
CONFIRMED_RUNS = 3
"""So often, at the least, that one odd run does not decide."""

Measure = Callable[[Candidate, int], Run]
"""Measures a placement for the n-th time (from 1).  Raises PlacementError where it cannot run."""


@dataclass
class Trial:
    """A placement and its runs so far.  One that failed once is not tried again: `failure` says how."""

    candidate: Candidate
    runs: list[Run] = field(default_factory=list)
    failure: str | None = None

    @property
    def seconds_per_token(self) -> float:
        """Median over the runs: what placements are compared by."""
        return median(run.seconds_per_token for run in self.runs)

    @property
    def spread(self) -> float:
        """How far the runs lie apart, as a share of their median."""
        seconds = [run.seconds_per_token for run in self.runs]
        return (max(seconds) - min(seconds)) / median(seconds)

    def take(self, measure: Measure) -> None:
        """One more run."""
        try:
            self.runs.append(measure(self.candidate, len(self.runs) + 1))
        except PlacementError as error:
            self.failure = str(error)


def measure_all(candidates: Sequence[Candidate], measure: Measure) -> list[Trial]:
    """Each candidate once, then the close ones in turn, so that a machine that grows busy does so for all.

    Of placements whose noise is within 1.4% the one that then has the least time is within 3% of the best.
    """
    trials = [Trial(candidate) for candidate in candidates]
    for trial in trials:
        trial.take(measure)
    while unsure := [trial for trial in close_ones(trials) if len(trial.runs) < CONFIRMED_RUNS]:
        for trial in unsure:
            trial.take(measure)
    return trials


def running(trials: Sequence[Trial]) -> list[Trial]:
    """Those that have not failed."""
    return [trial for trial in trials if trial.failure is None]


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Those that have not failed, the fastest first."""
    return sorted(running(trials), key=lambda trial: trial.seconds_per_token)


def close_ones(trials: Sequence[Trial]) -> list[Trial]:
    """The fastest and those within `CLOSE` of it, in the order of `trials`; none where it is alone."""
    left = running(trials)
    least = min((trial.seconds_per_token for trial in left), default=0.0)
    close = [trial for trial in left if trial.seconds_per_token <= least * (1 + CLOSE)]
    return close if len(close) > 1 else []
