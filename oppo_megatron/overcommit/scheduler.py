"""Admit prompts so that B + delta groups are in flight; `train/loop.py` calls it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from oppo_megatron.cores import uncollected
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Decision, Prompt, Rollout, StepSignals


class DeltaController(Protocol):
    @property
    def value(self) -> int: ...

    def observe(self, step: int, signals: StepSignals) -> Decision: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OvercommitScheduler:
    """`to_train`: rollouts still to train (None: no limit)."""

    def __init__(
        self,
        prompts: Iterator[Prompt],
        buffer: RolloutBuffer,
        delta_controller: DeltaController,
        backfill_every: int | None = None,
        to_train: int | None = None,
    ):
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
        self.due = self._next_admission()
        return self._admit()

    def backfill(self) -> list[Rollout]:
        if not self._backfills or self.buffer.clock < self.due:
            return []
        assert self._every is not None and self.buffer.clock == self.due, "a round went beyond an admission"
        self.due += self._every
        return self._admit()

    def refill(self) -> list[Rollout]:
        """Replace lost rollouts, unless a filter's backfill is due."""
        return [] if self.buffer.filtered and self.buffer.clock == self.due else self._admit()

    @property
    def admits(self) -> bool:
        return self._next_prompt is not None and self._room >= self.buffer.group_size

    def pass_by(self) -> None:
        assert self._every is not None and self.buffer.clock == self.due
        self.due += self._every

    def chunk(self, most: int) -> int:
        return min(most, self.due - self.buffer.clock) if self._backfills else most

    def take_batch(self) -> list[Rollout]:
        batch = self.buffer.take_batch()
        if self._to_train is not None:
            self._to_train -= len(batch)
        return batch

    def end_step(self, step: int, signals: StepSignals) -> Decision:
        decision = self._controller.observe(step, signals)
        self.buffer.set_delta(decision.value)
        return decision

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_consumed": self.num_consumed,
            "position": self.position,
            "due": self.due,
            "delta": self._controller.state_dict(),
            "buffer": self.buffer.state_dict(),
        }

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
            return True  # if not prompts, then verdicts
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
