"""Facts of a step for its metrics line (docs/metrics.md)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from oppo_megatron.train.score_exchange import ScoreReport

LATER_FACTS = ("scores", "actor", "rewards", "greedy_rewards", "filtered")
"""Facts known after the rollout phase, within which a checkpoint may interrupt a step."""

OTHER_FACTS = (
    *LATER_FACTS, "step", "version", "decode_steps", "drain_s", "local_score_s", "critic_exposed_s", "kl_coefficient",
)  # fmt: skip
"""Facts that a metrics line does not have, or has only at times."""


@dataclass
class StepFacts:
    step: int
    delta: int
    chunk_tokens: int | None
    tokens: int = 0  # decoded
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

    def fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in OTHER_FACTS}

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.planning_s += time.monotonic() - started
