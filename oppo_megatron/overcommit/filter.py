"""Dynamic sampling (arXiv 2503.14476, docs/algorithm.md): groups of equally good responses are not trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oppo_megatron.errors import SamplingError
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import TIE, Rollout

Scores = Sequence[float]
"""Scores of one response, by the parts that a verdict uses."""

Judge = Callable[[Sequence[Rollout]], Sequence[Scores]]
"""Waits for the scores of finished responses; returns the same on every rank."""


@dataclass(frozen=True)
class VerdictClock:
    """`period`: decode steps between admissions; `lag`: periods allowed for a score."""

    period: int
    lag: int = 0

    def due(self, clock: int) -> int:
        return self.period * (-(-clock // self.period) + self.lag)


@dataclass(frozen=True)
class Rule:
    """`metric` of the reward parts `labels` judges groups."""

    labels: tuple[str, ...]
    metric: Callable[[Scores], float]
    max_groups: int


@dataclass
class Counts:
    kept: int = 0
    dropped: int = 0

    @property
    def judged(self) -> int:
        return self.kept + self.dropped

    @property
    def keep_rate(self) -> float | None:
        return self.kept / self.judged if self.judged else None


class GroupFilter:
    def __init__(self, scheduler: OvercommitScheduler, clock: VerdictClock, rule: Rule):
        assert scheduler.buffer.filtered and scheduler.buffer.group_size > 1
        self.scheduler, self.clock, self.rule = scheduler, clock, rule
        self.scores: dict[int, Scores] = {}
        self.counts = Counts()

    def begin_step(self) -> None:
        self.counts = Counts()

    def settle(self, judge: Judge) -> list[Rollout]:
        """Apply due verdicts; return dropped rollouts. Raises SamplingError."""
        scheduler, buffer = self.scheduler, self.scheduler.buffer
        dropped: list[Rollout] = []
        while not buffer.readiness().ready:
            idle = not buffer.active
            if idle:
                buffer.pass_to(scheduler.due)
            if buffer.clock < scheduler.due:
                break
            dropped += self._judge(judge)
            if buffer.readiness().ready:
                break
            self._require_groups()
            if not idle or scheduler.admits:
                break
            scheduler.pass_by()
        return dropped

    def retire(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            self.scores.pop(rollout.seq_id, None)

    @property
    def known(self) -> int:
        return sum(self._differ(group) for group in self._groups().values() if not self._decided(group))

    def state_dict(self) -> dict[str, Any]:
        scores = [[i, [x if math.isfinite(x) else None for x in parts]] for i, parts in self.scores.items()]
        counts = {"kept": self.counts.kept, "dropped": self.counts.dropped}
        return {"labels": list(self.rule.labels), "scores": scores} | counts

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if state is None:
            return
        self.counts = Counts(state["kept"], state["dropped"])
        if state["labels"] == list(self.rule.labels):
            held = {rollout.seq_id for rollout in self.scheduler.buffer.rollouts if rollout.finished}
            numbers = {i: [math.nan if x is None else x for x in parts] for i, parts in state["scores"]}
            self.scores = {seq_id: parts for seq_id, parts in numbers.items() if seq_id in held}
        self.scheduler.buffer.keep(number for number, group in self._groups().items() if self._decided(group))

    def _judge(self, judge: Judge) -> list[Rollout]:
        buffer = self.scheduler.buffer
        due = [r for r in buffer.rollouts if self._is_due(r)]
        if due:
            self.scores |= dict(zip((r.seq_id for r in due), judge(due), strict=True))
        decided = {n: group for n, group in self._groups().items() if n not in buffer.kept and self._decided(group)}
        kept = {n for n, group in decided.items() if self._differ(group)}
        futile = decided.keys() - kept
        self.counts.kept += len(kept)
        self.counts.dropped += len(futile)
        buffer.keep(kept)
        dropped = buffer.drop(futile)
        self.retire(dropped)
        return dropped

    def _is_due(self, rollout: Rollout) -> bool:
        ended = rollout.finish_clock
        return ended is not None and rollout.seq_id not in self.scores and self.clock.due(ended) <= self.scheduler.due

    def _groups(self) -> dict[int, list[Rollout]]:
        groups: dict[int, list[Rollout]] = {}
        for rollout in self.scheduler.buffer.rollouts:
            groups.setdefault(rollout.seq_id // self.scheduler.buffer.group_size, []).append(rollout)
        return groups

    def _decided(self, group: Sequence[Rollout]) -> bool:
        return all(rollout.seq_id in self.scores for rollout in group)

    def _differ(self, group: Sequence[Rollout]) -> bool:
        """True if scores differ by more than `TIE`, or one is not finite: guards must see it."""
        values = [self.rule.metric(self.scores[r.seq_id]) for r in group if r.seq_id in self.scores]
        if not all(map(math.isfinite, values)):
            return True
        if not values:
            return False
        return max(values) - min(values) > TIE * max(map(abs, values))

    def _require_groups(self) -> None:
        counts = self.counts
        if counts.judged >= self.rule.max_groups:
            size = self.scheduler.buffer.group_size
            raise SamplingError(
                f"{counts.judged} groups were judged in this step, and {counts.kept} of them kept ({counts.keep_rate:.1%}), but "
                f"a batch has {self.scheduler.buffer.batch_size // size} ({self.known} more will be kept when they have ended): "
                "the responses to most prompts are all equally good; "
                "use prompts that the policy answers rightly now and then, or raise rollout.group_size"
            )
