"""Overcommit as a `PromptGroupSampler` of NeMo-RL's asynchronous controller (docs/nemo_rl.md), which awaits `admit` before
each batch of B prompts, and `select` until B groups are taken. A group starts with a version of the weights.
Newer controllers call `wait_until_admissible`, `commit_admission` in its place: a checkpoint may come between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from oppo_megatron.errors import ConfigError

POLL_S = 0.005  # between looks at the buffer, which does not signal changes


class OvercommitSampler:
    """Begins a batch when at most `delta` groups run (0: after the previous update); trains the B that finish first."""

    supports_buffer_checkpoint = True  # restored groups are as others; without them the restored index would be too high

    def __init__(self, buffer: Any, *, delta: int, max_staleness: int = 4):
        for name, value, least in (("delta", delta, 0), ("max_staleness", max_staleness, 1)):
            if type(value) is not int or value < least:
                raise ConfigError(f"async_rl.sampler.{name} is {value!r:.20}, but must be a whole number of {least} or more")
        self._buffer = buffer
        self._delta, self._max_staleness = delta, max_staleness
        self.dispatch_index = -1  # of the last admitted batch

    def set_dispatch_index(self, resume_from_trainer_version: int) -> None:
        self.dispatch_index = resume_from_trainer_version - 1

    def restore_dispatch_index(self, dispatch_index: int) -> None:
        self.dispatch_index = dispatch_index

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> None:
        """Wait until a batch may begin."""
        await self.wait_until_admissible(trainer_version_fn=trainer_version_fn)
        self.dispatch_index += 1

    async def wait_until_admissible(self, *, trainer_version_fn: Callable[[], int]) -> None:
        # The last admitted groups enter the buffer when their tasks first run, no later than this wakes up.
        await asyncio.sleep(POLL_S)
        ahead = self._delta > 0
        while self._buffer.ready_list.count(False) > self._delta or self.dispatch_index >= trainer_version_fn() + ahead:
            await asyncio.sleep(POLL_S)

    def commit_admission(self, cut: Any) -> None:
        cut.require_live()
        self.dispatch_index += 1

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
        first, *others = metas = [self._buffer.meta_list[i] for i in taken]
        made = first.concat(*others)
        if metrics := [row for meta in metas for row in (meta.extra_info or {}).get("rollout_metrics", ())]:
            made.extra_info["rollout_metrics"] = metrics  # `concat` keeps the first group's
        buffer = self._buffer  # older ones forget a group that is trained
        await (buffer.claim_for_training(taken) if hasattr(buffer, "claim_for_training") else buffer.remove(taken, False))
        return made, len(taken)

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
                f"async_rl.sampler.delta {self._delta} is more than {groups_per_step}, the prompts of a step; lower it"
            )
        return groups_per_step * (1 + (self._delta > 0))
