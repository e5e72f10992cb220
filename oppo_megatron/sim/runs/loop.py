"""The pure half of the training loop without models: scheduler, buffer, books, controllers.  Subclasses define a round.

Chunks are made up: every sequence grows by what its round allows, up to a length that is a function of its id.  There are no
rewards, so a `filter` is not played: every group is trained.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from oppo_megatron.chunks import GOES_ON, REASONS, Chunk, ChunkRows, merge_rows
from oppo_megatron.columns import Bools, Columns, Ints, columns_of
from oppo_megatron.config.derived import batch_rows, longest_chunk, members
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import ChunkTuner, StepCost
from oppo_megatron.control.delta_controllers import make_delta_controller
from oppo_megatron.control.occupancy import Occupancy, length_gap
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import Decision, Prompt, Rollout, StepSignals
from oppo_megatron.schedule.plan import delta_rule, plan_step
from oppo_megatron.schedule.planning.ledger import Ledger
from oppo_megatron.schedule.planning.planner import RoundPlanner

LENGTH = "length"
NO_FIELDS: dict[str, Any] = {}
"""All prompts share it: thousands a step are made."""


class HasSteps(Protocol):
    """A round that is planned."""

    @property
    def steps(self) -> int:
        """Decode steps."""


Planned = TypeVar("Planned", bound=HasSteps)


@dataclass(frozen=True)
class Growing:
    """The sequences that a round decodes: their columns, the tokens that each gets, and whether it ends with them."""

    columns: Columns
    counts: Ints
    ends: Bools


@dataclass(frozen=True)
class Recorded(Generic[Planned]):
    """A recorded round of step `step`; `chunk`: its result, None if it only scored.

    `begun`: the logical clock at which it began.  `grown` is what it would have decoded, had the batch not been complete sooner.
    """

    step: int
    planned: Planned
    begun: int
    grown: Growing | None = None
    chunk: Chunk | None = None


@dataclass(frozen=True)
class StepEnd:
    """A step's batch has been scored, and what it has shown is known to the controllers.

    `batch` and `carried` hold what is trained of it and what stays, in columns; `deferrals` are the batch's.
    """

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


class PureLoop(ABC, Generic[Planned]):
    """The work of one rank of a run, apart from its actions.

    `responses(seq_id)`: the tokens with which a response ends.  The planner is the run's own, with empty books.
    """

    def __init__(
        self, config: TrainConfig, prompts: Iterator[Prompt], responses: Callable[[int], int], planner: RoundPlanner
    ):
        self.config, self.length, self.planner = config, responses, planner
        self.stream, period = plan_step(config).stream, config.overlap.admission_period
        self.scheduler = OvercommitScheduler(
            prompts,
            RolloutBuffer(
                batch_rows(config),
                0,
                config.overlap.max_staleness,
                backfill=period is not None,
                group_size=members(config).size,
            ),
            make_delta_controller(delta_rule(config.overlap)),
            period,
        )
        self.chunk_tuner = ChunkTuner(config.overlap.chunk, longest_chunk(config))
        self.num_rounds = 0
        self._lengths = Ledger(LENGTH, {LENGTH: 0})

    @abstractmethod
    def _plan(self, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None) -> Planned:
        """Plan the next round, number `num_rounds`; the books advance."""

    @abstractmethod
    def _cost(self, end: StepEnd) -> StepCost:
        """Return the cost of a step up to its scores."""

    def _signals(self, step: int, signals: StepSignals) -> StepSignals:
        """Return the input of delta's controller; without models, rewards and staleness are unknown."""
        return signals

    def _part(self, name: str) -> AbstractContextManager[None]:
        """Around each part of the work, by name."""
        return nullcontext()

    def _body(self, counts: Ints) -> Ints:
        """Tokens and log-probs of a round's rows: none, for want of a model."""
        return np.zeros((3, 0), dtype=np.int64)

    def _open(self, admitted: Sequence[Rollout]) -> None:
        """Rollouts have been admitted."""
        if admitted:
            seq_ids = [rollout.prompt.seq_id for rollout in admitted]
            rows = self._lengths.rows(np.array(seq_ids, dtype=np.int64))
            self._lengths[LENGTH][rows] = list(map(self.length, seq_ids))

    def _send(self, chunk: Chunk) -> None:
        """A chunk is there, and will be recorded next."""

    def _recorded(self, done: Recorded[Planned]) -> None:
        """A round has ended."""

    def _decided(self, end: StepEnd, delta: Decision, chunk: Decision | None) -> None:
        """A step has ended; the controllers have decided for the next."""

    def _close(self, batch: Sequence[Rollout]) -> None:
        """The batch has been scored, and leaves."""

    def _steps(self) -> Iterator[Iterator[Recorded[Planned]]]:
        """For each step its rounds, to be taken one after the other; to the end of the prompts."""
        step = 0
        while not self.scheduler.done:
            step += 1
            yield self._step(step)

    def _step(self, step: int) -> Iterator[Recorded[Planned]]:
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
        yield from self._score(step, batch)
        trained, carried = map(members(self.config).to_train, (batch, buffer.rollouts))
        with self._part("controllers"):
            gap = length_gap(trained, carried)
        deferrals = np.array([rollout.deferrals for rollout in trained], dtype=np.int64)
        columns = columns_of(trained), columns_of(carried)
        self._end(StepEnd(step, *columns, deferrals, delta, chunk, buffer.clock, occupancy, gap, backfilled))
        self._retire(step, batch)

    def trains_actor(self, step: int) -> bool:
        """False while the critic warms up."""
        return step > self.config.ppo.critic_warmup_steps

    def _end(self, end: StepEnd) -> None:
        with self._part("controllers"):
            seen = StepSignals(0.0, end.occupancy.tail_waste, 1.0, end.length_gap)
            if self.trains_actor(end.step):
                delta = self.scheduler.end_step(end.step, self._signals(end.step, seen))
            else:
                delta = Decision(end.delta, f"step {end.step}: delta stays, the critic warms up", False)
            cost = self._cost(end)
            chunk = self.chunk_tuner.observe(end.step, cost) if self.stream else None
        self._decided(end, delta, chunk)

    def _round(
        self, step: int, active: Sequence[Rollout], score: Sequence[Rollout], readable: Ints, occupancy: Occupancy
    ) -> Recorded[Planned]:
        buffer, begun = self.scheduler.buffer, self.scheduler.buffer.clock
        planned = self._numbered(active, score, self.scheduler.chunk(self.chunk_tuner.value), readable)
        growing = self._decoded(planned, active)
        rows = self._made_up(growing)
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

    def _numbered(
        self, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None = None
    ) -> Planned:
        self.num_rounds += 1
        with self._part("planner and checker"):
            return self._plan(active, score, chunk, readable)

    def _decoded(self, planned: Planned, active: Sequence[Rollout]) -> Growing:
        """Return what the models would decode on all ranks; not timed."""
        grown = columns_of(active).at(self.planner.actor.runs(active))
        rows = self._lengths.rows(grown.seq_ids)
        left = self._lengths[LENGTH][rows] - grown.response_tokens
        counts = np.minimum(planned.steps, left)
        return Growing(grown, counts, counts == left)

    def _made_up(self, growing: Growing) -> ChunkRows:
        grown, counts, ends = growing.columns, growing.counts, growing.ends
        finish = np.where(ends, self.scheduler.buffer.clock + counts, GOES_ON)
        reasons = np.where(ends, REASONS.index("length"), 0)
        table = np.stack([grown.seq_ids, grown.response_tokens, counts, np.zeros_like(counts), finish, reasons])
        return ChunkRows.packed_as(table, self._body(counts))

    def _score(self, step: int, batch: Sequence[Rollout]) -> Iterator[Recorded[Planned]]:
        """Score the rest."""
        while True:
            with self._part("planner and checker"):
                if not self.planner.owes(batch):
                    break
            done = Recorded(step, self._numbered([], batch, self.chunk_tuner.value), self.scheduler.buffer.clock)
            self._recorded(done)
            yield done

    def _retire(self, step: int, batch: Sequence[Rollout]) -> None:
        """The rollouts have been trained, and what was computed by other weights is stale."""
        with self._part("planner and checker"):
            columns = columns_of(batch)
            for book in self.planner.scorers.values():
                book.forget(*columns.seq_ids.tolist())
            if self.trains_actor(step) and self.config.overlap.actor_kv == "recompute":
                self.planner.actor.invalidate()
            elif self.trains_actor(step):
                self.planner.actor.keep()
            self.planner.reset_perishable()
        self._lengths[LENGTH][self._lengths.rows(columns.seq_ids)] = 0
        self._close(batch)


def made_up_prompts(tokens: Sequence[int] | int, count: int | None) -> Iterator[Prompt]:
    """Yield `count` prompts (None: without end) with the given numbers of tokens, in turn."""
    sizes = [tokens] if isinstance(tokens, int) else list(tokens)
    texts = [(1,) * size for size in sizes]
    for seq_id in range(count) if count is not None else itertools.count():
        yield Prompt(seq_id, seq_id, "", texts[seq_id % len(texts)], NO_FIELDS)
