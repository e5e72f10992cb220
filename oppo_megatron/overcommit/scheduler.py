"""The overcommit scheduler: sits between the prompts and the decode engine, with B + delta rollouts in flight.

One step, as its owner runs it::

    while not scheduler.done:
        admitted = scheduler.begin_step()
        ...                                  # decode and record chunks until scheduler.buffer.readiness() is ready
        batch = scheduler.take_batch()
        ...                                  # score, train
        decision = scheduler.end_step(step, reward_mean)

Plain PPO is the same loop with delta fixed at 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Decision, Prompt, Rollout


class DeltaController(Protocol):
    """What sets delta from the rewards; `oppo_megatron.control.delta` has the rules."""

    @property
    def value(self) -> int: ...

    def observe(self, step: int, reward_mean: float) -> Decision: ...


class OvercommitScheduler:
    """Admits prompts, closes the buffer at their end, and hands the controller's delta to the buffer.

    One prompt is read ahead, so that the end of the prompts is known as soon as the last one has been admitted.
    """

    def __init__(self, prompts: Iterator[Prompt], buffer: RolloutBuffer, delta_controller: DeltaController):
        self.buffer = buffer
        self._prompts = prompts
        self._controller = delta_controller
        self._next_prompt = next(prompts, None)
        self._num_consumed = 0
        buffer.set_delta(delta_controller.value)

    @property
    def num_consumed(self) -> int:
        """Prompts admitted since the run began (the one read ahead is not counted)."""
        return self._num_consumed

    @property
    def done(self) -> bool:
        """The prompts have ended and every rollout has been trained."""
        return self._next_prompt is None and len(self.buffer) == 0

    def begin_step(self) -> list[Rollout]:
        """Admit prompts until the buffer is full or they end; return the new rollouts in order."""
        admitted: list[Prompt] = []
        while self._next_prompt is not None and len(admitted) < self.buffer.room:
            admitted.append(self._next_prompt)
            self._next_prompt = next(self._prompts, None)
        rollouts = self.buffer.admit(admitted)
        self._num_consumed += len(rollouts)
        if self._next_prompt is None:
            self.buffer.close()
        return rollouts

    def take_batch(self) -> list[Rollout]:
        """The step's batch, out of the buffer; what stays is deferred."""
        return self.buffer.take_batch()

    def end_step(self, step: int, reward_mean: float) -> Decision:
        """Give the controller the batch's mean reward and the buffer the delta it decides."""
        decision = self._controller.observe(step, reward_mean)
        self.buffer.set_delta(decision.value)
        return decision
