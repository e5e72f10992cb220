"""Tells, within a round, at which decode step the batch is complete."""

from __future__ import annotations

from collections.abc import Iterable, Set


class Readiness:
    """What a batch still waits for.

    A decode engine calls `finish` for the sequences that end at a decode step and then looks at `ready`; stopping
    there, and not at the end of the chunk, makes the batch and the state of all other rollouts the same for every chunk
    size.
    """

    def __init__(
        self,
        target: int,
        num_finished: int,
        unfinished: Set[int],
        waits: Iterable[tuple[Iterable[int], int]] = (),
        group_size: int = 1,
    ):
        """Groups that the batch has, and that have finished; sequences that have not, which nobody changes meanwhile.
        `waits`: of these sequences, so many groups have to finish before the batch is ready."""
        self._num_missing = target - num_finished
        self._unfinished = unfinished
        self._ended: set[int] = set()
        self._waits = [(frozenset(sequences), number) for sequences, number in waits]
        self._group_size = group_size

    @property
    def ready(self) -> bool:
        """Enough groups have finished, and with them all that may not be deferred again."""
        return self._num_missing <= 0 and not self._waits

    @property
    def least(self) -> int:
        """Sequences that have to end before it can be ready, at least: one of each group that is missing."""
        return max(self._num_missing, *(number for _, number in self._waits), 0)

    def finish(self, *seq_ids: int) -> None:
        """Note that the sequences have their last tokens."""
        ended = set(seq_ids)
        decoded = len(ended) == len(seq_ids) and self._ended.isdisjoint(ended) and self._unfinished >= ended
        self._ended |= ended
        assert decoded, f"of sequence {', '.join(map(str, seq_ids))} one is not decoded in this step or has already finished"
        if self._group_size == 1 and not self._waits:
            self._num_missing -= len(seq_ids)
            return
        whole = self._last_of_groups(set(seq_ids))
        self._num_missing -= len(whole)
        if self._waits:
            left = [(sequences, number - len(whole & sequences)) for sequences, number in self._waits]
            self._waits = [wait for wait in left if wait[1] > 0]

    def _last_of_groups(self, ended: set[int]) -> set[int]:
        """One for each group that has finished with sequences of `ended`."""
        if self._group_size == 1:
            return ended
        one_of_each = {seq_id // self._group_size: seq_id for seq_id in ended}
        return set(filter(self._was_last, one_of_each.values()))

    def _was_last(self, seq_id: int) -> bool:
        """Whether its group has finished with it."""
        first = seq_id - seq_id % self._group_size
        return all(i in self._ended for i in range(first, first + self._group_size) if i in self._unfinished)


class JudgedReadiness(Readiness):
    """With a filter: a batch is complete by verdicts, between rounds, and nothing that ends within one completes it."""

    def finish(self, *seq_ids: int) -> None:
        pass
