"""Overcommit as a `PromptGroupSampler` of NeMo-RL's asynchronous controller (docs/nemo_rl.md), which awaits `admit` before
each batch of B prompts, and `select` until B groups are taken. A group starts with a version of the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from oppo_megatron.errors import ConfigError

POLL_S = 0.005
"""Seconds between looks at the buffer, which does not signal changes."""


class OvercommitSampler:
    """Begins a batch when at most `delta` groups run (0: after the previous update); trains the B that finish first."""

    def __init__(self, buffer: Any, *, delta: int, max_staleness: int = 4):
        problems = [
            f"async_rl.sampler.{name} is {value!r:.20}, but must be a whole number of {least} or more"
            for name, value, least in (("delta", delta, 0), ("max_staleness", max_staleness, 1))
            if type(value) is not int or value < least
        ]
        if problems:
            raise ConfigError(problems)
        self._buffer = buffer
        self._delta, self._max_staleness = delta, max_staleness
        self._batches = 0

    def set_dispatch_index(self, resume_from_step: int) -> None:
        self._batches = resume_from_step

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        """Wait until a batch may begin."""
        # The last admitted groups enter the buffer when their tasks first run, no later than this wakes up.
        await asyncio.sleep(POLL_S)
        while self._buffer.ready_list.count(False) > self._delta or self._batches > trainer_version_fn() + (self._delta > 0):
            await asyncio.sleep(POLL_S)
        self._batches += 1
        return None

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> tuple[Any | None, int]:
        """Return rows and number of groups, oldest first; (None, 0) if too few are ready."""
        if not 1 <= min_prompt_groups <= max_prompt_groups:
            raise ValueError(f"{min_prompt_groups} to {max_prompt_groups} prompt groups are not a range to take")
        starts, ready = self._buffer.start_weight_list, self._buffer.ready_list
        due = [current_train_weight - start >= self._max_staleness for start in starts]
        kept = sum(due[i] and not ready[i] for i in range(len(starts)))
        found = sorted((i for i in range(len(starts)) if ready[i]), key=lambda i: (not due[i], i))
        taken = found[: max(0, max_prompt_groups - kept)]
        if len(taken) < min_prompt_groups:
            return None, 0
        first, *others = [self._buffer.meta_list[i] for i in taken]
        await self._buffer.remove(taken, remove_in_dp=False)
        return first.concat(*others), len(taken)

    async def evict(self, *, current_train_weight: int) -> int:
        return 0  # whatever was begun is trained

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        return False

    @property
    def is_on_policy(self) -> bool:
        return self._delta == 0

    def required_buffer_capacity(self, groups_per_step: int) -> int | None:
        """Least `async_rl.max_buffered_rollouts`.  Raises ConfigError."""
        if self._delta > groups_per_step:
            raise ConfigError(
                f"async_rl.sampler.delta {self._delta} is more than the {groups_per_step} prompts of a step; lower it"
            )
        return groups_per_step * (1 + (self._delta > 0))
