"""The rollouts in flight: one call advances every record of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np

from oppo_megatron.chunks import FREE, Chunk, FinishReason, Orders
from oppo_megatron.columns import columns_of
from oppo_megatron.config.overlap import OverlapConfig
from oppo_megatron.engine.round_runner import AllEnded, Decoding, RoundRunner
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.overcommit.scheduler import GroupFilter, OvercommitScheduler
from oppo_megatron.records import Lists, Rollout
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
    stopping: Stopping
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
        readiness = partial(AllEnded, active) if self.complete else buffer.readiness  # a complete batch may have to wait
        decoding = Decoding(buffer.clock, version, readiness, orders)
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

    def weights_changed(self, actor: bool, version: int) -> float | None:
        """Treat carried rollouts as configured.  Return the share of their tokens kept, if drawn again."""
        kept = self._redraw(version) if actor and self.overlap.carry == "redraw" else None
        if actor and self.overlap.carry != "keep":
            self.rounds.actor_changed()
        elif actor:
            self.rounds.planner.actor.keep()
        self.rounds.scorers_changed()
        return kept

    def _redraw(self, version: int) -> float | None:
        """Draw held responses again by the present weights.  Kept tokens get the new version and log-probs.

        Draws are keyed by (seed, sequence, position), so a response up to its first other token, and with that token, is what the
        present policy would have drawn from the start.  Collective of the world; replicas divide the rollouts.
        """
        held = [rollout for rollout in self.buffer.rollouts if rollout.num_response_tokens]
        rewritten, kept, made = list[Rollout](), list[int](), list[tuple[Rollout, Lists, FinishReason | None]]()
        checked = sum(rollout.num_response_tokens for rollout in held)
        for rollout, drawn in zip(held, self.exchange.drawn_again(held, self.rounds), strict=True):
            tokens, logprobs, sampling = list(map(int, drawn[0])), drawn[1], drawn[2]
            old = rollout.tokens
            same = next((place for place, pair in enumerate(zip(tokens, old, strict=True)) if pair[0] != pair[1]), len(old))
            size, reason = min(same + 1, len(old)), rollout.finish_reason
            if same < len(old):
                reason = self.stopping.after(old[:same], tokens[same], rollout.seq_id)
                rewritten.append(rollout)
                kept.append(same)
            free = [FREE] * size if rollout.routes else []  # drawn by a forward pass as training has it
            lists = old[:same] + tokens[same:size], logprobs[:size], sampling[:size], [version] * size, free
            made.append((rollout, lists, reason))
        self.buffer.rewrite(made)
        for rollout in rewritten:
            self.exchange.rewards.forget(rollout.seq_id)
        if self.filter is not None:
            self.filter.reopen(rewritten)
        self.rounds.cut(rewritten, kept)
        self.exchange.request(rewritten)
        left = sum(len(rollout.tokens) for rollout in held) - len(rewritten)
        return left / checked if checked else None
