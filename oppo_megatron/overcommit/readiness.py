"""Tells, within a round, at which decode step the batch is complete."""

from __future__ import annotations

from collections.abc import Iterable


class Readiness:
    """What a batch still waits for.

    A decode engine calls `finish` for every sequence that ends at a decode step and then looks at `ready`; stopping
    there, and not at the end of the chunk, makes the batch and the state of all other rollouts the same for every chunk
    size.
    """

    def __init__(
        self,
        target: int,
        num_finished: int,
        unfinished: Iterable[int],
        waits: Iterable[tuple[Iterable[int], int]] = (),
        group_size: int = 1,
    ):
        """Groups that the batch has, and that have finished; sequences that have not.  `waits`: of these sequences, so many
        groups have to finish before the batch is ready."""
        self._num_missing = target - num_finished
        self._unfinished = frozenset(unfinished)
        self._ended: set[int] = set()
        self._waits = [(frozenset(sequences), number) for sequences, number in waits]
        self._group_size = group_size

    @property
    def ready(self) -> bool:
        """Enough groups have finished, and with them all that may not be deferred again."""
        return self._num_missing <= 0 and not self._waits

    def finish(self, seq_id: int) -> None:
        """Note that the sequence has its last token."""
        decoded = seq_id in self._unfinished and seq_id not in self._ended
        assert decoded, f"sequence {seq_id} is not decoded in this step or has already finished"
        self._ended.add(seq_id)
        if self._was_last(seq_id):
            self._num_missing -= 1
            left = [(sequences, number - (seq_id in sequences)) for sequences, number in self._waits]
            self._waits = [wait for wait in left if wait[1] > 0]

    def _was_last(self, seq_id: int) -> bool:
        """Whether its group has finished with it."""
        first = seq_id - seq_id % self._group_size
        siblings = self._unfinished.intersection(range(first, first + self._group_size))
        return siblings <= self._ended


class JudgedReadiness(Readiness):
    """With a filter: a batch is complete by verdicts, between rounds, and nothing that ends within one completes it."""

    def finish(self, seq_id: int) -> None:
        pass
