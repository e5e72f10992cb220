"""By how much the critic's update holds up the scores of the next step: the scorers are a queue with a single server."""

from __future__ import annotations

from collections.abc import Sequence


def scoring_delay(update_s: float, work: Sequence[float], arrivals: Sequence[float]) -> float:
    """The seconds by which an update at the start of the scorers' step delays the end of its scoring.

    `work` is the scorers' (`StepClock.work`), `arrivals` the actor's (`StepClock.ends`); after each of the first rounds the
    scorers wait until its chunk is there.
    """
    return _end(work, arrivals, 0.0) - _end(work, arrivals, update_s)


def _end(work: Sequence[float], arrivals: Sequence[float], spared_s: float) -> float:
    now = work[0] - spared_s
    for index, seconds in enumerate(work[1:]):
        now += seconds
        if index < len(arrivals):
            now = max(now, arrivals[index])
    return now
