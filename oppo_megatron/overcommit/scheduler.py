"""Admits prompts so that B + delta groups are in flight, and filters groups; `train/loop.py` calls it.  Dynamic sampling (arXiv
2503.14476, docs/algorithm.md): groups of equally good responses are not trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from oppo_megatron.cores import uncollected
from oppo_megatron.errors import SamplingError
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import TIE, Decision, Prompt, Rollout, StepSignals


class DeltaController(Protocol):
    @property
    def value(self) -> int: ...

    def observe(self, step: int, signals: StepSignals) -> Decision: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OvercommitScheduler:
    """Admits prompts at a step's start and every `backfill_every` decode steps.  `to_train`: rollouts left (None: no limit)."""

    def __init__(
        self, prompts: Iterator[Prompt], buffer: RolloutBuffer, delta_controller: DeltaController,
        backfill_every: int | None = None, to_train: int | None = None,
    ):  # fmt: skip
        assert backfill_every is None or backfill_every >= 1
        assert buffer.backfill == (backfill_every is not None), "buffer and scheduler disagree about backfill"
        self.buffer = buffer
        assert backfill_every is not None or not buffer.filtered, "a filter's groups are replaced by backfill"
        self._every, self._to_train = backfill_every, to_train
        self.due = 0  # with backfill: the clock of the next admission within the step, and of a filter's verdicts
        self._prompts = prompts
        self._controller = delta_controller
        self._next_prompt = next(prompts, None)
        self.num_consumed = self.position = 0  # prompts admitted, and the position in their stream after the last
        buffer.set_delta(delta_controller.value)

    @property
    def done(self) -> bool:
        return self._next_prompt is None and len(self.buffer) == 0

    def begin_step(self) -> list[Rollout]:
        """Admit prompts after new weights were installed, or at the run's start."""
        self.buffer.pending = max(0, self.buffer.pending - 1)
        self.due = self._next_admission()
        return self._admit()

    def backfill(self) -> list[Rollout]:
        if not self._backfills or self.buffer.clock < self.due:
            return []
        self.pass_by()
        return self._admit()

    def pass_by(self) -> None:
        """Set `due` to the next admission; the clock has reached this one."""
        assert self._every is not None and self.buffer.clock == self.due, "a round went beyond an admission"
        self.due += self._every

    def refill(self) -> list[Rollout]:
        """Replace lost rollouts, unless a filter's backfill is due."""
        return [] if self.buffer.filtered and self.buffer.clock == self.due else self._admit()

    @property
    def admits(self) -> bool:
        return self._next_prompt is not None and self._room >= self.buffer.group_size

    def chunk(self, most: int) -> int:
        return min(most, self.due - self.buffer.clock) if self._backfills else most

    def take_batch(self) -> list[Rollout]:
        batch = self.buffer.take_batch()
        self.buffer.pending += 1
        if self._to_train is not None:
            self._to_train -= len(batch)
        return batch

    def end_step(self, step: int, signals: StepSignals) -> Decision:
        decision = self._controller.observe(step, signals)
        self.buffer.set_delta(decision.value)
        return decision

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_consumed": self.num_consumed, "position": self.position, "due": self.due,
            "delta": self._controller.state_dict(), "buffer": self.buffer.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any], rollouts: Iterable[Rollout]) -> None:
        self.num_consumed, self.position = state["num_consumed"], state["position"]
        self.due = state["due"]
        if self._every is not None:  # if backfill was off before, the clock has passed it
            self.due = max(self.due, state["buffer"]["clock"])
        self._controller.load_state_dict(state["delta"])
        self.buffer.load_state_dict(state["buffer"] | {"closed": self._next_prompt is None}, rollouts)
        self.buffer.set_delta(self._controller.value)
        if self.buffer.filtered and (self.due > self.buffer.clock or self.due % (self._every or 1)):
            self.due = self._next_admission()  # of this period

    @property
    def _backfills(self) -> bool:
        if self.buffer.filtered:
            return True  # also without prompts, because verdicts are due then
        return self._every is not None and self._next_prompt is not None and not self.buffer.full

    @property
    def _room(self) -> int:
        room = self.buffer.room
        return room if self._to_train is None else max(0, min(room, self._to_train - len(self.buffer)))

    def _next_admission(self) -> int:
        clock, every = self.buffer.clock, self._every or 0
        return every * (clock // every + 1) if self.buffer.filtered else clock + every

    @uncollected()
    def _admit(self) -> list[Rollout]:
        admitted: list[Prompt] = []
        room = self._room
        if self._next_prompt is not None and room:
            admitted = [self._next_prompt, *islice(self._prompts, room - 1)]
            self._next_prompt = next(self._prompts, None)
        rollouts = self.buffer.admit(admitted)
        self.num_consumed += len(rollouts)
        if rollouts:
            self.position = rollouts[-1].seq_id + 1
        if self._next_prompt is None:
            self.buffer.close()
        return rollouts


Scores = Sequence[float]
"""Scores of one response, by the parts that a verdict uses."""

Judge = Callable[[Sequence[Rollout]], Sequence[Scores]]
"""Waits for the scores of finished responses; returns the same on every rank."""


@dataclass(frozen=True)
class VerdictClock:
    """Verdicts take effect at multiples of `period` decode steps, `lag` periods late, to leave time for scores."""

    period: int
    lag: int = 0

    def due(self, clock: int) -> int:
        return self.period * (-(-clock // self.period) + self.lag)


@dataclass(frozen=True)
class Rule:
    """A group is judged by `metric` of its reward parts `labels`; a step may judge `max_groups`."""

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

    def apply_verdicts(self, judge: Judge) -> list[Rollout]:
        """Apply due verdicts; return dropped rollouts. Raises SamplingError after `max_groups` verdicts."""
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
            if not idle or scheduler.admits or buffer.pending:
                break
            scheduler.pass_by()
        return dropped

    def retire(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            self.scores.pop(rollout.seq_id, None)

    def reopen(self, rollouts: Sequence[Rollout]) -> None:
        """Forget the scores and verdicts of groups with responses that were rewritten."""
        self.retire(rollouts)
        buffer = self.scheduler.buffer
        buffer.kept -= {rollout.seq_id // buffer.group_size for rollout in rollouts}

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
        ended = [(r, r.finish_clock) for r in buffer.rollouts if r.seq_id not in self.scores]
        due = [r for r, clock in ended if clock is not None and self.clock.due(clock) <= self.scheduler.due]
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
