"""The pure half of the loop without models: scheduler, buffer, planner and its checker, stream, controllers, each timed.

Chunks are made up: every sequence grows by what its round allows, up to a length that is a function of its id.  There are no
rewards, so a `filter` is not played: every group is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from oppo_megatron.chunks import GOES_ON, REASONS, Chunk, ChunkRows
from oppo_megatron.columns import Ints, columns_of
from oppo_megatron.config.derived import batch_rows, longest_chunk, members
from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk_tuner import ChunkTuner, StepCost
from oppo_megatron.control.delta_controllers import make_delta_controller
from oppo_megatron.control.kl_controller import KLController
from oppo_megatron.control.occupancy import Occupancy, length_gap
from oppo_megatron.data.length_trace import forced_quantile
from oppo_megatron.engine.chunk_codec import ChunkDecoder, ChunkEncoder
from oppo_megatron.engine.stopping import Stopping
from oppo_megatron.layout.placements import role_placements
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.records import Prompt, Rollout, StepSignals
from oppo_megatron.schedule.plan import delta_rule, plan_step, round_generator
from oppo_megatron.schedule.planning.merge import merge_rows
from oppo_megatron.schedule.planning.new_planner import new_planner
from oppo_megatron.schedule.planning.planner import PlannedRound
from oppo_megatron.schedule.rounds import Site

PARTS = ("scheduler and buffer", "planner and checker", "stream", "controllers")


@dataclass
class Stopwatch:
    """Seconds of `clock` by part."""

    clock: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block."""
        started = self.clock()
        try:
            yield
        finally:
            self.seconds[name] += self.clock() - started


@dataclass(frozen=True)
class DryRound:
    """A round of step `step`; `chunk` is what came of it, None where it only scored."""

    step: int
    planned: PlannedRound
    chunk: Chunk | None


class DryRun:
    """What one rank of a run does beside its actions, and the codec of a listener.

    `prompt_tokens`: of all prompts, or of each.  `rank` is by default the actor's output rank; `clock` what seconds are told by.
    `responses(seq_id)`: the tokens with which a response ends, where that is not its limit.  `codec`: whether chunks are
    encoded and decoded.
    """

    def __init__(
        self,
        config: TrainConfig,
        prompt_tokens: int | Sequence[int],
        rank: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        responses: Callable[[int], int] | None = None,
        codec: bool = True,
    ):
        self.config, self.clock, self.watch = config, clock, Stopwatch(clock)
        self.site = Site(role_placements(config))
        self.codec = codec and bool(self.site.listeners)
        self.stream, period = plan_step(config).stream, config.overlap.admission_period
        trace = forced_quantile(config.debug.lengths, config.rollout.max_response_tokens)
        stopping = Stopping.of(config.rollout, (), config.seed, trace, forced=config.debug.lengths)
        self.limit: Callable[[int], int] = stopping.limit
        self.length = responses or self.limit
        generator = round_generator(config.overlap, self.site)
        rank = self.site.source if rank is None else rank
        self.planner = new_planner(config, self.site, generator, self.limit, rank=rank)
        assert config.steps is not None
        self.scheduler = OvercommitScheduler(
            self._prompts(config.steps * batch_rows(config), prompt_tokens),
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
        self.kl = KLController(config.ppo.kl)
        self.encoder, self.decoder = ChunkEncoder(), ChunkDecoder()
        self.num_rounds = 0

    def _prompts(self, count: int, num_tokens: int | Sequence[int]) -> Iterator[Prompt]:
        if isinstance(num_tokens, int):
            tokens = (1,) * num_tokens
            return (Prompt(seq_id, seq_id, "", tokens) for seq_id in range(count))
        return (Prompt(seq_id, seq_id, "", (1,) * size) for seq_id, size in enumerate(num_tokens[:count]))

    def run(self) -> list[dict[str, float]]:
        """Seconds by part of each step, to the end of the prompts."""
        steps: list[dict[str, float]] = []
        while not self.scheduler.done:
            self.watch = Stopwatch(self.clock)
            for _ in self._step(len(steps) + 1):
                pass
            steps.append(self.watch.seconds)
        return steps

    def rounds(self) -> Iterator[DryRound]:
        """The rounds of all steps, each once it is recorded."""
        step = 0
        while not self.scheduler.done:
            step += 1
            yield from self._step(step)

    def _step(self, step: int) -> Iterator[DryRound]:
        with self.watch.part("scheduler and buffer"):
            admitted = self.scheduler.begin_step()
        self._open(admitted)
        buffer, begun = self.scheduler.buffer, self.scheduler.buffer.clock
        occupancy = Occupancy(begun)
        started = self.clock()
        while True:
            with self.watch.part("scheduler and buffer"):
                if buffer.readiness().ready:
                    break
                admitted, active = self.scheduler.backfill(), buffer.active
                readable = buffer.worth_reading(self.config.overlap.critic_reads)
            self._open(admitted)
            yield self._round(step, active, buffer.rollouts if self.stream else [], readable, occupancy)
        seconds = self.clock() - started
        with self.watch.part("scheduler and buffer"):
            batch = self.scheduler.take_batch()
        yield from self._score(step, batch)
        with self.watch.part("controllers"):
            trained, carried = map(members(self.config).to_train, (batch, buffer.rollouts))
            gap = length_gap(trained, carried)
            self.scheduler.end_step(step, StepSignals(0.0, occupancy.tail_waste, 1.0, gap))
            self.kl.observe(0.0, len(trained))
            steps, tokens = buffer.clock - begun, int(columns_of(batch).response_tokens.sum())
            self.chunk_tuner.observe(step, StepCost(seconds, steps, tokens))
            if self.planner.generator == "woven":  # a run has measured other costs by now, and plans anew
                self.planner.learn(self.planner.costs)

    def _round(
        self, step: int, active: Sequence[Rollout], score: Sequence[Rollout], readable: Ints, occupancy: Occupancy
    ) -> DryRound:
        buffer = self.scheduler.buffer
        planned = self._plan(active, score, self.scheduler.chunk(self.chunk_tuner.value), readable)
        rows = self._decoded(planned, active)
        with self.watch.part("scheduler and buffer"):
            chunk = merge_rows(self.num_rounds, buffer.clock, rows, buffer.readiness())
        self._send(chunk)
        with self.watch.part("scheduler and buffer"):
            buffer.record(chunk)
            occupancy.record(chunk)
        with self.watch.part("planner and checker"):
            self.planner.actor.record(active)
        return DryRound(step, planned, chunk)

    def _plan(
        self, active: Sequence[Rollout], score: Sequence[Rollout], chunk: int, readable: Ints | None = None
    ) -> PlannedRound:
        self.num_rounds += 1
        with self.watch.part("planner and checker"):
            return self.planner.plan(self.num_rounds, active, score, chunk, self._order, readable)

    def _order(self, seq_ids: Sequence[int]) -> list[int]:
        """Open sequences in the order of their cache slots: as they were opened, for want of a cache."""
        return list(seq_ids)

    def _decoded(self, planned: PlannedRound, active: Sequence[Rollout]) -> ChunkRows:
        """What the models would have decoded on all ranks; not timed."""
        grown = columns_of(active).at(self.planner.actor.runs(active))
        lengths = np.array([self.length(seq_id) for seq_id in grown.seq_ids.tolist()], dtype=np.int64)
        left = lengths - grown.response_tokens
        counts = np.minimum(planned.round.steps, left)
        finish = np.where(counts == left, self.scheduler.buffer.clock + counts, GOES_ON)
        reasons = np.where(counts == left, REASONS.index("length"), 0)
        table = np.stack([grown.seq_ids, grown.response_tokens, counts, np.zeros_like(counts), finish, reasons])
        numbers = np.full((2, counts.sum()), -1.0)
        return ChunkRows.packed_as(
            table, np.concatenate([np.ones_like(numbers[:1], dtype=np.int64), numbers.view(np.int64)])
        )

    def _open(self, admitted: Sequence[Rollout]) -> None:
        for rollout in admitted:
            self.limit(rollout.seq_id)  # draw made-up lengths here, untimed: a run has one limit for all
        if self.codec:
            with self.watch.part("stream"):
                for rollout in admitted:
                    self.encoder.open(rollout.seq_id, rollout.prompt.tokens)
                    self.decoder.open(rollout.seq_id, rollout.prompt.tokens)

    def _send(self, chunk: Chunk) -> None:
        """Both ends: the time covers the actor's rank and a listener together."""
        if self.codec:
            with self.watch.part("stream"):
                self.decoder.decode(*self.encoder.encode(chunk))

    def _score(self, step: int, batch: Sequence[Rollout]) -> Iterator[DryRound]:
        """Score the rest; then the rollouts are trained."""
        while True:
            with self.watch.part("planner and checker"):
                if not self.planner.owes(batch):
                    break
            yield DryRound(step, self._plan([], batch, self.chunk_tuner.value), None)
        self._retire(batch)

    def _retire(self, batch: Sequence[Rollout]) -> None:
        with self.watch.part("planner and checker"):
            seq_ids = columns_of(batch).seq_ids.tolist()
            for book in self.planner.scorers.values():
                book.forget(*seq_ids)
            if self.config.overlap.actor_kv == "recompute":
                self.planner.actor.invalidate()
            else:
                self.planner.actor.keep()
            self.planner.reset_perishable()
        if self.codec:
            with self.watch.part("stream"):
                for rollout in batch:
                    self.encoder.close(rollout.seq_id)
                    self.decoder.close(rollout.seq_id)
