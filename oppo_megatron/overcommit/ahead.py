from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from oppo_megatron.errors import CheckpointError
from oppo_megatron.overcommit.readiness import needed_batch


@dataclass(frozen=True)
class Ahead:
    """`done` steps; prompts admitted before `position`, except `left_out`; `held` rollouts in flight."""

    done: int = 0
    position: int = 0
    held: int = 0
    left_out: Set[int] = frozenset()

    @property
    def given(self) -> int:
        return self.position - sum(each < self.position for each in self.left_out)

    def limit(self, steps: int | None, batch_size: int) -> int | None:
        """Prompts admitted by step `steps`; None if only the data end the run."""
        if steps is None:
            return None
        return self.given + max(0, (steps - self.done) * batch_size - self.held)

    def to_train(self, steps: int | None, batch_size: int) -> int | None:
        return None if steps is None else max(0, steps - self.done) * batch_size

    def total_steps(self, steps: int | None, planned: int | None, batch_size: int) -> int:
        if planned is None:
            assert steps is not None, "something ends a run"
            return steps
        by_data = self.done + math.ceil((planned - self.given + self.held) / batch_size)
        return by_data if steps is None else min(steps, by_data)


NEW_RUN = Ahead()


def require_resumable(done: int, steps: int | None) -> None:
    if steps is not None and steps < done:
        raise CheckpointError(
            f"steps is {steps}, but the checkpoint was saved after step {done}: there is no way back to fewer steps; set "
            f"steps to {done} to end the run there, or higher to continue"
        )


def require_prompts(ahead: Ahead, most: int | None, a_pass: int) -> None:
    if most is not None and ahead.position > most:
        passes = math.ceil(ahead.position / a_pass)
        raise CheckpointError(
            f"epochs comes to {most // a_pass}, but the checkpoint's run was at prompt {ahead.position}, in pass "
            f"{passes} over {a_pass} prompts: there is no way back to fewer; set epochs to {passes} or "
            "more, or give steps without it"
        )


def require_work(ahead: Ahead, steps: int | None, most: int | None, batch_size: int) -> None:
    ends = [end for end in (ahead.limit(steps, batch_size), most) if end is not None]
    if ahead.total_steps(steps, min(ends), batch_size) <= ahead.done:
        raise CheckpointError(
            f"the run has ended after {ahead.done} steps, and with these settings there is nothing more to train; raise steps, "
            "or epochs if they end the run, or choose another run_dir"
        )


def require_bounded_deferrals(deferrals: Sequence[int], groups: int, group_size: int, max_staleness: int) -> None:
    if max(deferrals, default=0) > max_staleness:
        raise CheckpointError(
            f"overlap.max_staleness is {max_staleness}, but the checkpoint holds a rollout that was deferred "
            f"{max(deferrals)} times; resume with overlap.max_staleness={max(deferrals)} or more"
        )
    needed = needed_batch(np.array(deferrals, dtype=np.int64), max_staleness)
    if needed > groups:
        forced = sum(each >= max_staleness for each in deferrals)
        raise CheckpointError(
            f"rollout.batch_size is {groups * group_size}, but the checkpoint holds rollouts of {len(deferrals)} prompts, and "
            f"{forced} of these may not be deferred again: not all could be trained within overlap.max_staleness="
            f"{max_staleness}; resume with rollout.batch_size={needed * group_size} or more"
        )
