"""The training loop without models. Responses grow up to a length given by their id; `filter` is not played."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from oppo_megatron.chunks import REASONS, UNFINISHED, Chunk, ChunkRows, merge_rows
from oppo_megatron.columns import Bools, Columns, Ints, columns_of
from oppo_megatron.config.derived import batch_rows, longest_chunk, members
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import ChunkTuner, Occupancy, StepCost, length_gap
from oppo_megatron.control.delta_controllers import make_delta_controller
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import Decision, Prompt, Rollout, StepSignals
from oppo_megatron.schedule.plan import delta_rule, plan_step
from oppo_megatron.schedule.planning.book import Ledger
from oppo_megatron.schedule.planning.planner import RoundPlanner

LENGTH = "length"
NO_FIELDS: dict[str, Any] = {}
"""Shared by the thousands of prompts of a step."""


@dataclass(frozen=True)
class Growing:
    columns: Columns
    counts: Ints
    ends: Bools


@dataclass(frozen=True)
class Recorded:
    """`grown`: tokens as if decoding did not stop at the complete batch; `chunk`: real ones. None if the round only scored."""

    step: int
    planned: Any
    begun: int
    grown: Growing | None = None
    chunk: Chunk | None = None


@dataclass(frozen=True)
class StepEnd:
    """`batch` is trained (with `deferrals`), `carried` stays."""

    step: int
    batch: Columns
    carried: Columns
    deferrals: Ints
    delta: int
    chunk_tokens: int
    clock: int
    occupancy: Occupancy
    length_gap: float
    backfilled: int


class PureLoop:
    """One rank's work. `responses(seq_id)`: response length. The planner has empty books."""

    def __init__(self, config: TrainConfig, prompts: Iterator[Prompt], responses: Callable[[int], int], planner: RoundPlanner):
        self.config, self.length, self.planner = config, responses, planner
        self.stream, period = plan_step(config).stream, config.overlap.admission_period
        self.scheduler = OvercommitScheduler(
            prompts,
            RolloutBuffer(
                batch_rows(config), 0, config.overlap.max_staleness, backfill=period is not None, group_size=members(config).size
            ),
            make_delta_controller(delta_rule(config.overlap)),
            period,
        )
        self.chunk_tuner = ChunkTuner(config.overlap.chunk_sizes, longest_chunk(config))
        self.num_rounds = 0
        self._lengths = Ledger(LENGTH, {LENGTH: 0})

    def _plan(self, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None) -> Any:
        raise NotImplementedError

    def _cost(self, end: StepEnd) -> StepCost:
        raise NotImplementedError

    def _signals(self, step: int, signals: StepSignals) -> StepSignals:
        """Input of delta's controller; rewards are constant by default."""
        return signals

    def _part(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def _body(self, counts: Ints) -> Ints:
        return np.zeros((3, 0), dtype=np.int64)

    def _open(self, admitted: Sequence[Rollout]) -> None:
        if admitted:
            seq_ids = [rollout.prompt.seq_id for rollout in admitted]
            rows = self._lengths.rows(np.array(seq_ids, dtype=np.int64))
            self._lengths[LENGTH][rows] = list(map(self.length, seq_ids))

    def _send(self, chunk: Chunk) -> None:
        """Called before a chunk is recorded."""

    def _recorded(self, done: Recorded) -> None:
        """Called after a round."""

    def _decided(self, end: StepEnd, delta: Decision, chunk: Decision | None) -> None:
        """Called with the controllers' decisions for the next step."""

    def _close(self, batch: Sequence[Rollout]) -> None:
        """Called when the batch leaves."""

    def _steps(self) -> Iterator[Iterator[Recorded]]:
        step = 0
        while not self.scheduler.done:
            step += 1
            yield self._step(step)

    def _step(self, step: int) -> Iterator[Recorded]:
        with self._part("scheduler and buffer"):
            admitted = self.scheduler.begin_step()
        self._open(admitted)
        buffer, delta, chunk, backfilled = self.scheduler.buffer, self.scheduler.buffer.delta, self.chunk_tuner.value, 0
        occupancy = Occupancy(buffer.clock)
        while True:
            with self._part("scheduler and buffer"):
                if buffer.readiness().ready:
                    break
                admitted, active = self.scheduler.backfill(), buffer.active
                backfilled += len(admitted)
                readable = buffer.worth_reading()
            self._open(admitted)
            yield self._round(step, active, buffer.rollouts if self.stream else [], readable, occupancy)
        with self._part("scheduler and buffer"):
            batch = self.scheduler.take_batch()
        while True:  # rounds that only score
            with self._part("planner and checker"):
                if not self.planner.owes(batch):
                    break
            done = Recorded(step, self._numbered([], batch, self.chunk_tuner.value), buffer.clock)
            self._recorded(done)
            yield done
        trained, carried = map(members(self.config).to_train, (batch, buffer.rollouts))
        deferrals = np.array([rollout.deferrals for rollout in trained], dtype=np.int64)
        with self._part("controllers"):
            gap, columns = length_gap(trained, carried), (columns_of(trained), columns_of(carried))
            end = StepEnd(step, *columns, deferrals, delta, chunk, buffer.clock, occupancy, gap, backfilled)
            if self.trains_actor(step):
                signals = StepSignals(0.0, occupancy.tail_waste, 1.0, gap)
                next_delta = self.scheduler.end_step(step, self._signals(step, signals))
            else:
                next_delta = Decision(delta, f"step {step}: delta stays, the critic warms up", False)
            cost = self._cost(end)
            next_chunk = self.chunk_tuner.observe(step, cost) if self.stream else None
        self._decided(end, next_delta, next_chunk)
        self._retire(step, batch)

    def trains_actor(self, step: int) -> bool:
        return step > self.config.ppo.critic_warmup_steps

    def _round(
        self, step: int, active: Sequence[Rollout], score: Sequence[Rollout], readable: Ints, occupancy: Occupancy,
        most: int | None = None,
    ) -> Recorded:  # fmt: skip
        buffer, begun = self.scheduler.buffer, self.scheduler.buffer.clock
        chunk_tokens = self.scheduler.chunk(self.chunk_tuner.value)
        planned = self._numbered(active, score, chunk_tokens if most is None else min(chunk_tokens, most), readable)
        growing = self._decoded(planned, active)
        grown, counts, ends = growing.columns, growing.counts, growing.ends
        finish = np.where(ends, buffer.clock + counts, UNFINISHED)
        reasons = np.where(ends, REASONS.index("length"), 0)
        table = np.stack([grown.seq_ids, grown.response_tokens, counts, np.zeros_like(counts), finish, reasons])
        rows = ChunkRows.packed_as(table, self._body(counts))
        with self._part("scheduler and buffer"):
            chunk = merge_rows(self.num_rounds, buffer.clock, rows, buffer.readiness())
        self._send(chunk)
        with self._part("scheduler and buffer"):
            buffer.record(chunk)
            occupancy.record(chunk)
        done = Recorded(step, planned, begun, growing, chunk)
        self._recorded(done)
        with self._part("planner and checker"):
            self.planner.actor.record(active)
        return done

    def _numbered(self, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None = None) -> Any:
        self.num_rounds += 1
        with self._part("planner and checker"):
            return self._plan(active, score, chunk, readable)

    def _decoded(self, planned: Any, active: Sequence[Rollout]) -> Growing:
        """Rows that models would decode on all ranks."""
        grown = columns_of(active).at(self.planner.actor.runs(active))
        left = self._lengths[LENGTH][self._lengths.rows(grown.seq_ids)] - grown.response_tokens
        counts = np.minimum(planned.steps, left)
        return Growing(grown, counts, counts == left)

    def _retire(self, step: int, batch: Sequence[Rollout]) -> None:
        with self._part("planner and checker"):
            columns = columns_of(batch)
            for book in self.planner.scorers.values():
                book.forget(*columns.seq_ids.tolist())
            if self.trains_actor(step) and self.config.overlap.carry != "keep":
                self.planner.actor.invalidate()
            elif self.trains_actor(step):
                self.planner.actor.keep()
            self.planner.reset_perishable()
        self._lengths[LENGTH][self._lengths.rows(columns.seq_ids)] = 0
        self._close(batch)


def made_up_prompts(tokens: Sequence[int] | int, count: int | None) -> Iterator[Prompt]:
    """Yield `count` prompts (None: endless) with these numbers of tokens, in turn."""
    sizes = [tokens] if isinstance(tokens, int) else list(tokens)
    texts = [(1,) * size for size in sizes]
    for seq_id in range(count) if count is not None else itertools.count():
        yield Prompt(seq_id, seq_id, "", texts[seq_id % len(texts)], NO_FIELDS)
