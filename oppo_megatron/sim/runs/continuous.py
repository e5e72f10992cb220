"""Continuous generation in virtual time, for an actor that is trained on ranks of its own (`train/continuous.py`).

The trainers' clock is one number: they begin with a batch when its scores are there and the batch before is installed.  A copy of
staged weights into place takes no time here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any

import numpy as np

from oppo_megatron.columns import Columns, Held, columns_of
from oppo_megatron.config.derived import members
from oppo_megatron.control.chunk_tuner import Occupancy, length_gap
from oppo_megatron.layout.placements import trains_apart
from oppo_megatron.records import Rollout, StepSignals
from oppo_megatron.sim.runs.loop import Recorded, StepEnd
from oppo_megatron.sim.runs.virtual import Parts, VirtualRun, VirtualStep


@dataclass
class _Taken:
    batch: Sequence[Rollout]
    clock: int
    occupancy: Occupancy
    update_s: float = 0.0
    arrives: float = inf  # seconds at which its weights can be installed


class ContinuousRun(VirtualRun):
    """`installs`: version and decode clock, as in `installs.jsonl`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        rules = self.config.overlap.continuous
        assert rules is not None
        self.lag = None if rules.lag_steps == "asap" else rules.lag_steps
        self.staged = rules.install == "staged"
        self.queue: deque[_Taken] = deque()
        self.installs: list[tuple[int, int]] = []
        self._occupancy = Occupancy(0)

    def _steps(self) -> Iterator[Iterator[Recorded]]:
        step = 0
        while not self.scheduler.done or self.queue:
            step += 1
            yield self._step(step)

    def _step(self, step: int) -> Iterator[Recorded]:
        """Decode on until version `step` is installed."""
        buffer, source, arrived = self.scheduler.buffer, self.units.source, False
        self._open(self.scheduler.begin_step())
        while True:
            if len(buffer) and buffer.readiness().ready:
                self.queue.append(_Taken(self.scheduler.take_batch(), buffer.clock, self._occupancy))
                self._occupancy = Occupancy(buffer.clock)
                continue
            first, left = self.queue[0] if self.queue else None, None
            if first is not None:
                if first.arrives == inf and not self.planner.owes(first.batch):
                    self._train(first)
                left = None if self.lag is None else first.clock + self.lag - buffer.clock
                if arrived or not buffer.active or (left is not None and left <= 0):
                    break
            began = float(self.now[source])
            waiting = [taken.batch for taken in self.queue if taken.arrives == inf] if self.stream else []
            readable = np.concatenate([*(columns_of(batch).seq_ids for batch in waiting), buffer.worth_reading()])
            score = _together([*waiting, buffer.rollouts]) if self.stream else []
            yield self._round(step, buffer.active, score, readable, self._occupancy, left)
            arrived = first is not None and self.lag is None and first.arrives <= began
        first = self.queue.popleft()
        while self.planner.owes(first.batch):
            done = Recorded(step, self._numbered([], first.batch, self.chunk_tuner.value), buffer.clock)
            self._recorded(done)
            yield done
        if first.arrives == inf:
            self._train(first)
        self._install(step, first)

    def _train(self, taken: _Taken) -> None:
        """Begin the update once the scores are there; trainers are idle then."""
        tokens, begins = int(columns_of(taken.batch).response_tokens.sum()), float(self.now.max())
        taken.update_s = self.costs.update_s("actor", tokens) + self._apart_critic_s(tokens)
        taken.arrives = begins + taken.update_s + (self.costs.moves.get("actor", 0.0) if self.staged else 0.0)

    def _install(self, step: int, taken: _Taken) -> None:
        """Go on when all ranks agree on the success of the updates; the critic is updated now."""
        holds, source, buffer = self.units.holds("actor"), self.units.source, self.scheduler.buffer
        moved_s, tokens = self.costs.moves.get("actor", 0.0), int(columns_of(taken.batch).response_tokens.sum())
        critic_s = self.costs.moves.get("critic", 0.0) + self.costs.update_s("critic", tokens)
        if not self.units.holds("critic").any():  # it has none, or one whose ranks only train
            critic_s = 0.0
        agreed = max(taken.arrives, float((self.now + self.units.holds("critic") * critic_s).max()))
        waited_s, ends = agreed - float(self.now[source]), np.full(len(self.units), agreed + (0.0 if self.staged else moved_s))
        self._trace(step, "actor", "wait_update", self.now, np.where(holds, ends, self.now))
        self.now = ends
        self.installs.append((step, buffer.clock))
        trained, carried = map(members(self.config).to_train, (taken.batch, buffer.rollouts))
        deferrals, gap = np.array([rollout.deferrals for rollout in trained], dtype=np.int64), length_gap(trained, carried)
        columns, times = (columns_of(trained), columns_of(carried)), self._times
        end = StepEnd(
            step, *columns, deferrals, buffer.delta, self.chunk_tuner.value, buffer.clock, taken.occupancy, gap, backfilled=0
        )
        signals = StepSignals(0.0, taken.occupancy.tail_waste, 1.0, gap)
        delta = self.scheduler.end_step(step, self._signals(step, signals))
        step_s = float(self.now[source]) - times.begun
        paused_s = 0.0 if self.staged else moved_s
        parts = Parts(times.decode_s, 0.0, 0.0, 0.0, paused_s, step_s - times.decode_s - paused_s)
        line = self._line(end, delta, None, step_s, 0.0) | {
            "train_s": taken.update_s, "reallocate_s": moved_s, "critic_update_s": critic_s, "queued_batches": len(self.queue),
            "install_lag": buffer.clock - taken.clock,
            "idle_s": {"actor": waited_s, "scorer": times.scorer_idle_s, "trainer": max(0.0, step_s - taken.update_s)},
        }  # fmt: skip
        rows = end.batch
        self._ended.append(
            VirtualStep(
                step, times.begun, step_s, parts, taken.occupancy.num_steps, end.clock, end.delta, end.chunk_tokens,
                rows.seq_ids, rows.response_tokens, deferrals, times.tokens, np.inf, 0.0, 0.0, line,
            )
        )  # fmt: skip
        self._retire(step, taken.batch)


def _together(parts: Sequence[Sequence[Rollout]]) -> Held:
    """Join rollouts with their columns, which the buffer knows and a list would count again."""
    columns = Columns(*map(np.concatenate, zip(*map(columns_of, parts), strict=True)))
    return Held(chain(*parts), {}, lambda: columns)


def run_of(*args: Any, **options: Any) -> VirtualRun:
    """Return the kind of run that the configuration, the first argument, asks for."""
    config = args[0]
    apart = config.overlap.continuous is not None and trains_apart(config)
    return (ContinuousRun if apart else VirtualRun)(*args, **options)
