"""The rollout buffer: holds B + delta growing rollouts, and selects B of them as a step's batch.

Legend: B is the batch size, delta the number of rollouts decoded beyond it, *clock* the logical clock (decode steps
since the run began).  Nothing here depends on wall time or on the size of a chunk, so a batch can be repeated.

Life of a rollout::

      admit            record                record with              take_batch
    ---------> waiting --------> decoding ---------------> finished -----------> trained (left the buffer)
               |    ^            |    ^     finish_clock   |    ^
               +----+            +----+                    +----+
              deferred          deferred                  deferred (a surplus finisher)

Every `take_batch` defers what it leaves: `deferrals` + 1, all tokens kept.  A rollout with `max_deferrals` deferrals is
*forced*: the batch is not ready before it has finished, and it is taken first.

Invariants (held by the unit tests):

1. Every admitted rollout leaves the buffer once, in exactly one batch, with every token that was recorded for it.
2. Admission never makes the buffer hold more than B + delta.  A smaller delta drops nothing: the buffer drains.
   With backfill, which also admits within a step, finished rollouts make room for others: admission never makes the
   buffer hold more than B + delta unfinished rollouts, nor more than 2B in all.
3. A batch has B rollouts; only after the end of the prompts may the last one have fewer.
4. Forced rollouts apart, no rollout of a batch finished after one that stayed behind finished (ties: by admission).
5. While delta <= B (with backfill: always), no rollout is trained with more than `max_deferrals` deferrals: a batch of
   B out of at most B + delta (with backfill: 2B) rollouts leaves behind at most B, hence no more than B are forced, and
   the next batch has room for them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from oppo_megatron.errors import StreamError
from oppo_megatron.records import Chunk, ChunkRow, Prompt, Rollout

CriticReads = Literal["sure", "likely", "all"]


class Readiness:
    """Tells, within a round, at which decode step the batch is complete.

    A decode engine calls `finish` for every sequence that ends at a decode step and then looks at `ready`; stopping
    there, and not at the end of the chunk, makes the batch and the state of all other rollouts the same for every chunk
    size.
    """

    def __init__(self, target: int, num_finished: int, unfinished: Iterable[int], forced: Iterable[int]):
        """`forced` are the sequences among `unfinished` that the batch has to wait for."""
        self._num_missing = target - num_finished
        self._unfinished = set(unfinished)
        self._forced = set(forced)

    @property
    def ready(self) -> bool:
        """Enough rollouts have finished, and with them every rollout that may not be deferred again."""
        return self._num_missing <= 0 and not self._forced

    def finish(self, seq_id: int) -> None:
        """Note that the sequence has its last token."""
        assert seq_id in self._unfinished, f"sequence {seq_id} is not decoded in this step or has already finished"
        self._unfinished.remove(seq_id)
        self._forced.discard(seq_id)
        self._num_missing -= 1


class RolloutBuffer:
    """Rollouts from admission to training; see the state machine and the invariants at the top of this file."""

    def __init__(self, batch_size: int, delta: int, max_deferrals: int, *, backfill: bool = False):
        assert batch_size >= 1 and delta >= 0 and max_deferrals >= 1
        self.batch_size = batch_size
        self.max_deferrals = max_deferrals
        self.backfill = backfill
        self._delta = delta
        self._rollouts: dict[int, Rollout] = {}  # by seq_id, in the order of admission
        self._num_admitted = 0
        self._clock = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._rollouts)

    @property
    def delta(self) -> int:
        return self._delta

    @property
    def capacity(self) -> int:
        """B + delta."""
        return self.batch_size + self._delta

    @property
    def room(self) -> int:
        """How many prompts may be admitted now; 0 while the buffer drains after delta has shrunk."""
        if self.backfill:
            return max(0, min(self.capacity - len(self.active), 2 * self.batch_size - len(self)))
        return max(0, self.capacity - len(self))

    @property
    def full(self) -> bool:
        """With backfill: no more prompts may be admitted before the batch has left."""
        return len(self) >= 2 * self.batch_size

    @property
    def clock(self) -> int:
        """Logical clock after the last recorded chunk."""
        return self._clock

    @property
    def target(self) -> int:
        """Size of the next batch: B, or the remaining rollouts once the prompts have ended."""
        return min(self.batch_size, len(self)) if self._closed else self.batch_size

    @property
    def rollouts(self) -> list[Rollout]:
        """Everything held, in the order of admission."""
        return list(self._rollouts.values())

    @property
    def active(self) -> list[Rollout]:
        """The unfinished rollouts, in the order of admission."""
        return [r for r in self._rollouts.values() if not r.finished]

    @property
    def sure(self) -> set[int]:
        """Sequences that the next batch will have, whatever is decoded from here on.

        Unfinished ones are, where nothing but them can fill it.  Among the finished, those that come first: whatever
        finishes later comes after them.
        """
        if len(self) <= self.target and (self._closed or not self.backfill):
            return set(self._rollouts)
        return {r.seq_id for r in self._foremost()}

    def worth_reading(self, reads: CriticReads) -> set[int]:
        """Sequences that the critic reads now, though what it computes is lost where they are carried on.

        sure: those that the next batch will have.  likely: all, while no more of the unfinished will be left behind than
        will be in the batch; then `sure`.  all: all.
        """
        sure = self.sure
        unsure = {r.seq_id for r in self.active} - sure
        missing = self.target - len(sure)
        if reads == "all" or (reads == "likely" and 2 * missing >= len(unsure)):
            return set(self._rollouts)
        return sure

    def admit(self, prompts: Iterable[Prompt]) -> list[Rollout]:
        """Hold a new rollout for each prompt.  Admission numbers count on over the run."""
        prompts = list(prompts)
        assert len(prompts) <= self.room, f"{len(prompts)} prompts admitted into room for {self.room}"
        assert not (self._closed and prompts), "prompts admitted after the end of the prompts"
        admitted = []
        for prompt in prompts:
            assert prompt.seq_id not in self._rollouts, f"sequence {prompt.seq_id} is already in the buffer"
            rollout = Rollout(prompt, admission=self._num_admitted)
            self._rollouts[prompt.seq_id] = rollout
            self._num_admitted += 1
            admitted.append(rollout)
        return admitted

    def set_delta(self, delta: int) -> None:
        """Change the capacity to B + `delta`.  Rollouts beyond a smaller capacity stay until they have been trained."""
        assert delta >= 0
        self._delta = delta

    def close(self) -> None:
        """The prompts have ended: from here on the last batch may be smaller than B."""
        self._closed = True

    def readiness(self) -> Readiness:
        """A fresh counter of what the next batch still waits for."""
        unfinished = self.active
        return Readiness(
            target=self.target,
            num_finished=len(self) - len(unfinished),
            unfinished=[r.seq_id for r in unfinished],
            forced=[r.seq_id for r in unfinished if self._forced(r)],
        )

    def record(self, chunk: Chunk) -> None:
        """Append a round's tokens to their rollouts.

        All rows are checked before any is recorded.  StreamError, naming the sequence and the offset: an unknown
        sequence or one that has finished, a gap or a repetition of tokens, a clock that runs backwards.
        """
        if chunk.clock < self._clock:
            where = f"sequence {chunk.rows[0].seq_id}, offset {chunk.rows[0].offset}" if chunk.rows else "no rows"
            raise StreamError(
                f"chunk {chunk.index} ({where}): its clock is {chunk.clock}, but {self._clock} is already recorded; "
                f"chunks must be recorded in the order in which they were decoded"
            )
        seen: set[int] = set()
        for row in chunk.rows:
            problem = self._problem(row, chunk.clock)
            if row.seq_id in seen:
                problem = "the sequence has two rows in this chunk; it may have one"
            if problem:
                raise StreamError(f"chunk {chunk.index}, sequence {row.seq_id}, offset {row.offset}: {problem}")
            seen.add(row.seq_id)
        for row in chunk.rows:
            self._rollouts[row.seq_id].extend(row)
        self._clock = chunk.clock

    def state_dict(self) -> dict[str, Any]:
        """All but the rollouts, in plain JSON types."""
        return {"clock": self._clock, "num_admitted": self._num_admitted, "delta": self._delta, "closed": self._closed}

    def load_state_dict(self, state: dict[str, Any], rollouts: Iterable[Rollout]) -> None:
        """Continue from `state` with the rollouts that were held, in the order of admission."""
        self._clock, self._num_admitted = state["clock"], state["num_admitted"]
        self._delta, self._closed = state["delta"], state["closed"]
        self._rollouts = {rollout.seq_id: rollout for rollout in rollouts}

    def take_batch(self) -> list[Rollout]:
        """Remove the batch and return it, by (finish_clock, admission); defer everything else."""
        assert self.readiness().ready, "take_batch before the batch is ready"
        batch = sorted(self._foremost(), key=finish_order)
        for rollout in batch:
            del self._rollouts[rollout.seq_id]
        for rollout in self._rollouts.values():
            rollout.deferrals += 1
        return batch

    def _foremost(self) -> list[Rollout]:
        """What of the next batch is settled.

        Forced rollouts are chosen first (the oldest, should delta > B have made more than B of them), then finished
        ones by (finish_clock, admission).
        """
        forced = [r for r in self._rollouts.values() if self._forced(r)]
        others = [r for r in self._rollouts.values() if r.finished and not self._forced(r)]
        return [*forced, *sorted(others, key=finish_order)][: self.target]

    def _forced(self, rollout: Rollout) -> bool:
        return rollout.deferrals >= self.max_deferrals

    def _problem(self, row: ChunkRow, clock: int) -> str | None:
        """Why a row of a chunk that ends at `clock` cannot be recorded, or None."""
        rollout = self._rollouts.get(row.seq_id)
        if rollout is None:
            return "the sequence is not in the buffer; it was never admitted or has already been trained"
        if rollout.finished:
            return f"it finished at clock {rollout.finish_clock} with {len(rollout.tokens)} tokens; none may follow"
        if row.offset != len(rollout.tokens):
            kind = "lost" if row.offset > len(rollout.tokens) else "repeated"
            return f"the next token has offset {len(rollout.tokens)}; a chunk was {kind}"
        if not len(row.tokens) == len(row.logprobs) == len(row.sampling_logprobs):
            return (
                f"{len(row.tokens)} tokens come with {len(row.logprobs)} log-probs and {len(row.sampling_logprobs)} "
                f"sampling log-probs; each token needs one of both"
            )
        if row.finish_clock is not None and not self._clock <= row.finish_clock <= clock:
            return f"it finished at clock {row.finish_clock}, outside the round's clocks {self._clock}..{clock}"
        return None


def finish_order(rollout: Rollout) -> tuple[int, int]:
    """Sort key of finished rollouts: when they finished, ties by admission."""
    assert rollout.finish_clock is not None
    return rollout.finish_clock, rollout.admission
