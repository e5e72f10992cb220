from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from oppo_megatron.columns import Bools, Ints
from oppo_megatron.errors import CheckpointError


class Readiness:
    """Tracks if a batch is complete.  Decoding stops as soon as it is `ready`, so batches do not depend on the chunk size."""

    def __init__(
        self, target: int, num_finished: int, unfinished: Set[int], waits: Iterable[tuple[Iterable[int], int]] = (),
        group_size: int = 1,
    ):  # fmt: skip
        """`waits`: (sequences, how many of their groups must still finish) pairs; `target`, `num_finished`: groups."""
        self._num_missing = target - num_finished
        self._unfinished = unfinished
        self._ended: set[int] = set()
        self._waits = [(frozenset(i // group_size for i in sequences), number) for sequences, number in waits]
        self._group_size = group_size

    @property
    def ready(self) -> bool:
        return self._num_missing <= 0 and not self._waits

    def finish(self, *seq_ids: int) -> None:
        ended, size = set(seq_ids), self._group_size
        decoded = len(ended) == len(seq_ids) and self._ended.isdisjoint(ended) and self._unfinished >= ended
        assert decoded, f"sequence {', '.join(map(str, seq_ids))}: not decoded in this step, or already finished"
        self._ended |= ended
        groups = {seq_id // size for seq_id in ended}
        whole = {g for g in groups if self._unfinished.isdisjoint(set(range(g * size, (g + 1) * size)) - self._ended)}
        self._num_missing -= len(whole)
        self._waits = [(of, left) for of, number in self._waits if (left := number - len(whole & of)) > 0]


class JudgedReadiness(Readiness):
    """With a filter: its verdicts, between rounds, complete a batch; decoding never does."""

    def finish(self, *seq_ids: int) -> None:
        pass


def due(ages_G: Ints, batch: int, most: int) -> Iterator[tuple[Bools, int]]:
    """Yield S_k (a mask of groups) and r_k ("A bound on staleness", docs/algorithm.md) if r_k > 0, oldest first; `most` is η."""
    for k in range(min(most, len(ages_G) // batch) + 1):
        members_G = ages_G >= most - k
        needed = int(members_G.sum()) - k * batch
        if needed > 0:
            yield members_G, needed


def next_groups(finished_G: Bools, clocks_G: Ints, ages_G: Ints, batch: int, most: int, target: int) -> Ints:
    """Choose a batch: groups of age η, then the first finishers of each S_k up to r_k (see `due`), then of all."""
    finishers = np.flatnonzero(finished_G)
    chosen_G, reserved = ages_G >= most, 0
    if chosen_G.sum() > target:  # possible after settings changed: the first admitted
        return np.flatnonzero(chosen_G)[:target]
    for members_G, needed in due(ages_G, batch, most):
        missing = needed - int((chosen_G & members_G).sum()) - reserved  # reserved ones of an older class are members, too
        room = target - int(chosen_G.sum()) - reserved
        first = _first(finishers[(members_G & ~chosen_G)[finishers]], clocks_G, min(missing, room))
        chosen_G[first] = True
        reserved += max(0, missing - len(first))
    places = target - int(chosen_G.sum()) - reserved
    chosen_G[_first(finishers[~chosen_G[finishers]], clocks_G, places)] = True
    return np.flatnonzero(chosen_G)


def _first(groups: Ints, clocks_G: Ints, number: int) -> Ints:
    if len(groups) <= max(0, number):
        return groups
    return groups[np.argsort(clocks_G[groups], kind="stable")][: max(0, number)]


@dataclass(frozen=True)
class Ahead:
    """The point to continue from: `done` steps, next prompt's stream `position`, `held` rollouts; `left_out`: skipped prompts."""

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
            assert steps is not None, "steps, epochs or the prompts end a run"
            return steps
        by_data = self.done + math.ceil((planned - self.given + self.held) / batch_size)
        return by_data if steps is None else min(steps, by_data)


NEW_RUN = Ahead()


def require_resumable(done: int, steps: int | None) -> None:
    if steps is not None and steps < done:
        raise CheckpointError(
            f"steps is {steps}, but the checkpoint was saved after step {done}: it cannot go back to fewer steps; set "
            f"steps to {done} to end the run there, or higher to continue"
        )


def require_prompts(ahead: Ahead, most: int | None, a_pass: Fraction | int) -> None:
    if most is not None and ahead.position > most:
        passes = math.ceil(ahead.position / a_pass)
        raise CheckpointError(
            f"epochs comes to {most // a_pass}, but the checkpoint's run was at prompt {ahead.position}, in pass "
            f"{passes} over {math.ceil(a_pass)} prompts: it cannot go back to fewer; set epochs to {passes} or "
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
    # The smallest B that trains these in time: |S_k| <= (k + 1) B for each k.
    ages = np.array(deferrals, dtype=np.int64)
    needed = max((-(-int((ages >= max_staleness - k).sum()) // (k + 1)) for k in range(max_staleness + 1)), default=0)
    if needed > groups:
        forced = sum(each >= max_staleness for each in deferrals)
        raise CheckpointError(
            f"rollout.batch_size is {groups * group_size}, but the checkpoint holds rollouts of {len(deferrals)} prompts, and "
            f"{forced} of these may not be deferred again: not all could be trained within overlap.max_staleness="
            f"{max_staleness}; resume with rollout.batch_size={needed * group_size} or more"
        )
