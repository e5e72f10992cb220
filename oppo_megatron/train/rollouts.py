"""The rollouts in flight: one call advances every record of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from oppo_megatron.chunks import Chunk
from oppo_megatron.config.overlap import OverlapConfig
from oppo_megatron.engine.round_runner import Decoding, RoundRunner
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.filter import GroupFilter
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.overcommit.settling import Settler, known
from oppo_megatron.records import Rollout
from oppo_megatron.train.score_exchange import Known, ScoreExchange

NOTHING = np.zeros(0, dtype=np.int64)  # no sequence


@dataclass
class Rollouts:
    """The records are the buffer (a rollout's tokens), the planner's books (what each role has cached), the caches and outputs
    of this rank's workers, the codec of the token stream, and what reward services have been asked for.  All but the
    workers' are alike on every rank.

    `planning` times the decisions and bookkeeping here.
    """

    scheduler: OvercommitScheduler
    rounds: RoundRunner
    exchange: ScoreExchange
    overlap: OverlapConfig
    planning: Callable[[], AbstractContextManager[None]]
    filter: GroupFilter | None = None
    settler: Settler | None = None

    @property
    def buffer(self) -> RolloutBuffer:
        return self.scheduler.buffer

    @property
    def complete(self) -> bool:
        """Whether the step's batch has finished."""
        return self.buffer.readiness().ready

    def admit(self) -> None:
        """Prompts enter at the begin of a step, up to B + delta."""
        with self.planning():
            self.rounds.admit(self.scheduler.begin_step())
        if self.settler is not None:
            self.settler.begin_step()
        if self.filter is not None:
            self.filter.begin_step()
            self._settle(self.filter)

    def decode(self, most: int, version: int, *, stream: bool, halt: bool) -> tuple[Chunk, int]:
        """A round: at most `most` tokens more of each rollout by the policy's `version`; all records advance by its chunk.

        With `stream` the scorers prefill what came before.  `halt`: the run is to stop after this round.  Returns the
        chunk, and how many prompts entered before it in the place of what has finished.
        """
        buffer = self.buffer
        with self.planning():
            backfilled = self.scheduler.backfill()
            self.rounds.admit(backfilled)
            active, score = buffer.active, buffer.rollouts if stream else []
            readable = buffer.worth_reading()
        decoding = Decoding(buffer.clock, version, buffer.readiness, halt)
        chunk = self.rounds.run(active, score, self._steps(most), decoding, readable)
        assert chunk is not None
        with self.planning():
            buffer.record(chunk)
            self.rounds.recorded(active)
        self.exchange.request(active)
        if self.settler is not None and self.settler.due:
            self._end_early(self.settler)
        if self.filter is not None:
            self._settle(self.filter)
        return chunk, len(backfilled)

    @property
    def judged(self) -> Known:
        """Parts of rewards that verdicts were made from."""
        if self.filter is None:
            return {}
        labels = self.filter.rule.labels
        return {seq_id: dict(zip(labels, parts, strict=True)) for seq_id, parts in self.filter.scores.items()}

    def _steps(self, most: int) -> int:
        """Decode steps of the next round: `most`, or as many as are left until prompts may enter, or rewards are asked."""
        steps = self.scheduler.chunk(most)
        return steps if self.settler is None else min(steps, self.settler.clock.left(self.buffer.clock))

    def settle_figures(self) -> dict[str, float | None]:
        """Of the responses that ended early in the step; none where none can."""
        return {} if self.settler is None else self.settler.figures()

    def filter_figures(self) -> dict[str, float | None]:
        """Of the step's groups, for its line in the metrics; none where there is no filter."""
        if self.filter is None:
            return {}
        counts = self.filter.counts
        return {"groups_dropped": counts.dropped, "keep_rate": counts.keep_rate}

    def _settle(self, groups: GroupFilter) -> None:
        """Verdicts that are due come into force; dropped groups leave every record."""
        labels = groups.rule.labels

        def judge(due: Sequence[Rollout]) -> list[list[float]]:
            if self.exchange.rewards.reads_model(labels):
                while self.rounds.owes(due, "reward"):
                    self.rounds.run([], due, 1, Decoding(self.buffer.clock, 0, self.buffer.readiness), NOTHING)
            return self.exchange.judge(due, self.rounds, labels)

        dropped = groups.settle(judge)
        self._stop([rollout for rollout in dropped if not rollout.finished])
        self.rounds.give_up(dropped)
        for rollout in dropped:
            self.exchange.rewards.forget(rollout.seq_id)
        if self.settler is not None:
            self.settler.retire(dropped)

    def _end_early(self, settler: Settler) -> None:
        """Responses whose rewards are settled end; a filter hears what is known of those that go on."""
        asked = settler.asked()
        prefixes = self.exchange.prefixes(asked) if asked else []
        self._stop(settler.take(asked, prefixes))
        if self.filter is not None:
            labels, of = settler.labels, self.filter.rule.labels
            found = {i: known(prefix, labels, of) for i, prefix in settler.foreseen(asked, prefixes).items()}
            self.filter.foreseen = {i: scores for i, scores in found.items() if scores is not None}

    def _stop(self, rollouts: Sequence[Rollout]) -> None:
        """These are decoded no further."""
        if rollouts:
            self.rounds.stop(rollouts)

    def take_batch(self) -> list[Rollout]:
        """The first B that finished leave the buffer; the others are deferred."""
        with self.planning():
            return self.scheduler.take_batch()

    def owed(self, batch: Sequence[Rollout]) -> bool:
        """Whether a scorer, here or elsewhere, has not read all of the batch."""
        return self.rounds.owes(batch)

    def score(self, batch: Sequence[Rollout], most: int, version: int) -> None:
        """A round that scores the rest of the batch, and decodes nothing."""
        self.rounds.run([], batch, most, Decoding(self.buffer.clock, version, self.buffer.readiness))

    def retire(self, batch: Sequence[Rollout]) -> None:
        """The batch's scores are everywhere: no record is needed any more."""
        with self.planning():
            self.rounds.retire(batch)
        if self.filter is not None:
            self.filter.retire(batch)
        if self.settler is not None:
            self.settler.retire(batch)

    def weights_changed(self, actor: bool) -> None:
        """Trained roles have other weights: what they have cached of carried rollouts is stale, where it is not kept.

        `actor`: it is among them.
        """
        if actor and self.overlap.actor_kv == "recompute":
            self.rounds.actor_changed()
        elif actor:
            self.rounds.actor_kept()
        self.rounds.scorers_changed()
