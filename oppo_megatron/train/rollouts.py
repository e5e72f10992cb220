"""The rollouts in flight: one call advances every record of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from oppo_megatron.chunks import Chunk, Orders
from oppo_megatron.columns import columns_of
from oppo_megatron.config.overlap import OverlapConfig
from oppo_megatron.engine.round_runner import Decoding, RoundRunner
from oppo_megatron.overcommit.scheduler import GroupFilter, OvercommitScheduler
from oppo_megatron.records import Rollout
from oppo_megatron.train.score_exchange import Known, ScoreExchange

NOTHING = np.zeros(0, dtype=np.int64)  # no sequence


@dataclass
class Rollouts:
    """Scheduler, buffer, books and workers: each call advances all of them.  `planning()` measures time spent on decisions."""

    scheduler: OvercommitScheduler
    rounds: RoundRunner
    exchange: ScoreExchange
    overlap: OverlapConfig
    planning: Callable[[], AbstractContextManager[None]]
    filter: GroupFilter | None = None

    def __post_init__(self) -> None:
        self.buffer = self.scheduler.buffer

    @property
    def complete(self) -> bool:
        return self.buffer.readiness().ready

    def admit(self) -> None:
        with self.planning():
            self.rounds.admit(self.scheduler.begin_step())
        if self.filter is not None:
            self._filter_groups(self.filter)

    def begin_phase(self) -> None:
        if self.filter is not None:
            self.filter.begin_step()

    def decode(self, most: int, version: int, queued: Sequence[Rollout], *, stream: bool, orders: Orders) -> tuple[Chunk, int]:
        """Run a round of at most `most` tokens each; return chunk and number of new rollouts.

        `stream`: score while decoding; `queued`: complete rollouts to score.
        """
        buffer = self.buffer
        with self.planning():
            backfilled = self.scheduler.backfill()
            self.rounds.admit(backfilled)
            active, score = buffer.active, list[Rollout]() if not stream else buffer.rollouts
            readable = buffer.worth_reading()
            if queued:
                score = [*queued, *score]
                readable = np.concatenate([columns_of(queued).seq_ids, readable])
        decoding = Decoding(buffer.clock, version, buffer.readiness, orders)
        chunk = self.rounds.run(active, score, self.scheduler.chunk(most), decoding, readable)
        assert chunk is not None
        with self.planning():
            buffer.record(chunk)
            self.rounds.recorded(active)
        self.exchange.request(active)
        if self.filter is not None:
            self._filter_groups(self.filter)
        return chunk, len(backfilled)

    @property
    def judged(self) -> Known:
        if self.filter is None:
            return {}
        labels = self.filter.rule.labels
        return {seq_id: dict(zip(labels, parts, strict=True)) for seq_id, parts in self.filter.scores.items()}

    def figures(self) -> dict[str, float | None]:
        if self.filter is None:
            return {}
        counts = self.filter.counts
        return {"groups_dropped": counts.dropped, "keep_rate": counts.keep_rate}

    def _filter_groups(self, groups: GroupFilter) -> None:
        labels = groups.rule.labels

        def judge(due: Sequence[Rollout]) -> list[list[float]]:
            if self.exchange.rewards.reads_model(labels):
                while self.rounds.owes(due, "reward"):
                    self.rounds.run([], due, 1, Decoding(self.buffer.clock, 0, self.buffer.readiness), NOTHING)
            return self.exchange.judge(due, self.rounds, labels)

        dropped = groups.apply_verdicts(judge)
        self.rounds.give_up(dropped)
        for rollout in dropped:
            self.exchange.rewards.forget(rollout.seq_id)

    def take_batch(self) -> list[Rollout]:
        with self.planning():
            return self.scheduler.take_batch()

    def score(self, batch: Sequence[Rollout], most: int, version: int) -> None:
        self.rounds.run([], batch, most, Decoding(self.buffer.clock, version, self.buffer.readiness))

    def retire(self, batch: Sequence[Rollout]) -> None:
        with self.planning():
            self.rounds.retire(batch)
        if self.filter is not None:
            self.filter.retire(batch)

    def weights_changed(self, actor: bool) -> None:
        """Invalidate caches of carried rollouts, unless configured to be kept."""
        if actor and self.overlap.actor_kv == "recompute":
            self.rounds.actor_changed()
        elif actor:
            self.rounds.planner.actor.keep()
        self.rounds.scorers_changed()
