"""Splits the critic's update into the part for which the actor waits, and the part hidden by the actor's own work.

If the critic has ranks of its own and the step does not wait for it (`debug.wait_for`), the update of step k delays the scorers
at the start of step k + 1, and chunks queue up meanwhile.  The scorers then are a queue with a single server, which has absorbed
the delay if it is idle again before the last chunk.  Its idle time after the update does not tell how long it would have been
idle without the update.  So the step is replayed with the update and without it, over the arrival times of the chunks and the
seconds of work on each.  The critic's first rank stands for the scorers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class StepClock:
    """One rank's rounds of a step, in seconds since it met all others for the scores of the step before.

    `ends`: of the rounds that decode; on the actor's output rank the times at which the chunks were there.
    `work`: the work before the first round (the critic's update is in it), then in each round, the drawn-out end
    of the scoring included; waits for chunks are left out.
    """

    now: Callable[[], float] = time.monotonic
    met: float = 0.0
    ends: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    _last: float = 0.0
    _waited: float = 0.0

    def meet(self) -> None:
        """All ranks have the scores of a step: their updates begin."""
        self.met = self.now()

    def begin(self) -> None:
        """A step begins."""
        self._last, self._waited, self.ends = self.now(), 0.0, []
        self.work = [self._last - self.met]

    def round(self, waited_s: float, *, decoded: bool) -> None:
        """A round has ended.  `waited_s`: for chunks, in the step so far."""
        now = self.now()
        self.work.append(now - self._last - (waited_s - self._waited))
        self._last, self._waited = now, waited_s
        if decoded:
            self.ends.append(now - self.met)


@dataclass(frozen=True)
class CriticPlacement:
    """Where the critic's update stands to the actor's time.

    `shares_ranks`: some rank makes both updates, one after the other; `waited_for`: a step ends when both have ended.
    """

    shares_ranks: bool
    waited_for: bool

    @property
    def delays_scores(self) -> bool:
        """Whether the update runs into the next step, so that what the actor waits for it is part of its wait for scores."""
        return not (self.shares_ranks or self.waited_for)

    def exposed_s(self, update_s: float, waited_s: float) -> float:
        """Seconds of an update that are on the actor's path; `waited_s`: what it waited for it beside its own update."""
        return update_s if self.shares_ranks else min(update_s, waited_s)
