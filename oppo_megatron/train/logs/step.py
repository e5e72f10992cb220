"""Facts of a step for its metrics line, and the times that split the critic's update (docs/metrics.md).

A critic's update on its own ranks may delay the next step's scorers, who absorb the delay if they are idle again before the last
chunk.  So the step is replayed with and without it, as a single-server queue.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from oppo_megatron.train.score_exchange import ScoreReport

LATER_FACTS = ("scores", "actor", "rewards", "greedy_rewards", "filtered")
"""Facts known after the rollout phase, within which a checkpoint may interrupt a step."""


@dataclass
class StepFacts:
    step: int
    delta: int
    chunk_tokens: int | None
    tokens_decoded: int = 0
    decode_steps: int = 0
    tail_waste: float = 0.0
    length_gap: float = 0.0
    backfilled: int = 0  # rollouts admitted after the step had begun
    prefilled_tokens: int = 0  # computed by prefills of all roles on all ranks
    forked_tokens: int = 0  # of prompts, that no role on any rank has computed again
    step_s: float = 0.0
    decode_s: float = 0.0  # rounds that decoded
    drain_s: float = 0.0  # rounds after the last decoded chunk
    planning_s: float = 0.0  # scheduler, buffer, planner, checker and controllers
    local_score_s: float = 0.0  # scoring on the rank that keeps the journal
    critic_exposed_s: float = 0.0  # of the wait for scores: for the critic's update of the step before
    kl_coefficient: float = 0.0
    delta_reason: str = ""
    chunk_reason: str = ""
    version: int = 0
    skipped: str | None = None  # why nothing was trained
    rewards: list[float] = field(default_factory=list)  # of what is trained
    greedy_rewards: list[float] = field(default_factory=list)
    checkpoint_s: float = 0.0  # waiting for checkpoints before this step
    checkpoint_bytes: int = 0  # of those that became whole
    checkpoint_hidden_s: float = 0.0  # and what of their writing the run did not wait for
    scores: ScoreReport | None = None
    actor: dict[str, float] = field(default_factory=dict)
    filtered: dict[str, float | None] = field(default_factory=dict)  # by a filter

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.planning_s += time.monotonic() - started


@dataclass
class StepClock:
    """One rank's rounds of a step, in seconds since all met for the previous scores.

    `ends`: of decoding rounds.  `work`: before the first round (with the critic's update), then per round, without waits for
    chunks.
    """

    now: Callable[[], float] = time.monotonic
    met: float = 0.0
    ends: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    _last: float = 0.0
    _waited: float = 0.0

    def meet(self) -> None:
        self.met = self.now()

    def begin(self) -> None:
        self._last, self._waited, self.ends = self.now(), 0.0, []
        self.work = [self._last - self.met]

    def round(self, waited_s: float, *, decoded: bool) -> None:
        """`waited_s`: waited for chunks in this step so far."""
        now = self.now()
        self.work.append(now - self._last - (waited_s - self._waited))
        self._last, self._waited = now, waited_s
        if decoded:
            self.ends.append(now - self.met)


@dataclass(frozen=True)
class CriticPlacement:
    """`shares_ranks`: some rank makes both updates; `waited_for`: a step ends only after both."""

    shares_ranks: bool
    waited_for: bool

    @property
    def delays_scores(self) -> bool:
        return not (self.shares_ranks or self.waited_for)

    def exposed_s(self, update_s: float, waited_s: float) -> float:
        """Seconds by which an update delays the actor, which waited `waited_s` for it."""
        return update_s if self.shares_ranks else min(update_s, waited_s)
