"""Continuous generation: decoding continues while complete batches wait, are scored and trained.

Batch j is trained on version j, the weights after j steps, and makes version j + 1, which is *installed* for decoding at a clock
that `Installs` names.  Prompts are admitted after installations only, so tokens, batches and versions follow from the seed and
these clocks: every placement, and one process, repeats a run from its log.  Nothing is installed out of order, and one batch is
in training at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from oppo_megatron.chunks import Orders
from oppo_megatron.config.overlap import ContinuousConfig
from oppo_megatron.errors import DataError
from oppo_megatron.layout.placements import trains_apart
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.rundir.directory import RunDirectory, encode_json
from oppo_megatron.rundir.metrics_log import read_installs
from oppo_megatron.schedule.plan import StepPlan
from oppo_megatron.train.logs.meter import RolloutPhase
from oppo_megatron.train.loop import Taken, TrainingLoop


@dataclass
class Installs:
    """The clocks of installations.  `lag_steps` after a batch was complete (None: when weights arrive), or as `replayed`.

    `log`: on the rank that writes it.
    """

    lag_steps: int | None
    replayed: Mapping[int, int] | None = None
    log: Path | None = None

    @classmethod
    def of(cls, config: ContinuousConfig, log: Path | None) -> Installs:
        """Collective of the world."""
        lag = None if config.lag_steps == "asap" else config.lag_steps
        if config.replay is None:
            return cls(lag, log=log)
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            found = [read_installs(config.replay)]
        dist.broadcast_object_list(found, src=0)
        return cls(lag, found[0], log)

    def steps_until(self, version: int, complete_at: int, clock: int) -> int | None:
        """Return decode steps until `version` is due, at most 0 if it is; None if it is due as soon as it arrives.

        Raises DataError if a log has installed the weights before their batch is complete.
        """
        if self.replayed is not None and version in self.replayed:
            if self.replayed[version] < complete_at:
                raise DataError(
                    f"overlap.continuous.replay says that version {version} was installed at clock {self.replayed[version]}, but "
                    f"its batch is complete at {complete_at}; give the log of a run with the same seed, data and settings"
                )
            return self.replayed[version] - clock
        return None if self.lag_steps is None else complete_at + self.lag_steps - clock

    def record(self, version: int, clock: int, digest: int) -> None:
        if self.log is not None:
            line = {"version": version, "clock": clock} | ({"weights": f"{digest:08x}"} if digest else {})
            with self.log.open("a", encoding="utf-8") as file:
                file.write(encode_json(line) + "\n")


@dataclass
class ContinuousLoop(TrainingLoop):
    """`queue`: complete batches, in order; the first is the next to be trained."""

    queue: deque[Taken] = field(default_factory=deque)
    halted: bool = False  # within a step

    def __post_init__(self) -> None:
        super().__post_init__()
        rules, log = self.config.overlap.continuous, RunDirectory(self.config.run_dir).installs
        assert rules is not None
        self.installs = Installs.of(rules, None if self.journal is None else log)
        self.apart = trains_apart(self.config)

    def _step(self, step: int, plan: StepPlan) -> bool:
        """Decode on until version `step` is installed; False if asked to stop."""
        self._admit(step)
        plan, arrived = replace(plan, forward_ahead=False), False
        waits = self.config.overlap.carry == "redraw"  # to take a batch, until no weights are to come before it is trained
        while True:
            if len(self.buffer) and self.rollouts.complete and not (waits and self.queue):
                self.queue.append(self._take())
                self._begin_phase(step + len(self.queue))
                continue
            first = self.queue[0] if self.queue else None
            if first is None and not self.buffer.active:
                return True  # the prompts have ended
            left = None
            if first is not None:
                if first.scored is None and not self.rounds.owes(first.batch):
                    self._score_first(step, plan)
                left = self.installs.steps_until(step, first.clock, self.buffer.clock)
                if arrived or not self.buffer.active or (left is not None and left <= 0):
                    break
            chunk = self._decode(plan, left)
            arrived = Orders.INSTALL in chunk.orders
            if Orders.HALT in chunk.orders:
                if first is None or first.scored is None:
                    self.halted = True
                    return False
                self.saver.stopping = True  # after the installation
        if self.queue[0].scored is None:
            self._score_first(step, plan)
        taken = self.queue.popleft()
        taken.phase.facts.figures |= {"queued_batches": len(self.queue), "install_lag": self.buffer.clock - taken.clock}
        with self._phase_of(taken.phase):
            self._train(step, taken, plan)
        self.installs.record(step, self.buffer.clock, self.updates.digest)
        return True

    def _score_first(self, step: int, plan: StepPlan) -> None:
        """Share the first batch's scores.  Ranks that only train then do so, while the others decode and receive weights."""
        first = self.queue[0]
        with self._phase_of(first.phase):
            self._score(step, first, plan)
            if not self.apart:
                return
            if self.world.rank in self.rounds.planner.site.followers:
                assert first.scored is not None
                first.update = self.updates.make(step, self.exchange.members.to_train(first.batch), first.scored)
            self.updates.begin_publishing(step, first.update)

    def _orders(self, deciding: dist.ProcessGroup) -> Orders:
        first = self.queue[0] if self.queue else None
        timed = first is None or self.installs.steps_until(self.done + 1, first.clock, self.buffer.clock) is not None
        missing = timed or first is None or first.scored is None or not self.updates.arrived
        asked, missing = self.saver.preemption.agreed_with(missing, self.world.activity, deciding)
        return (Orders.HALT if asked else Orders.NONE) | (Orders.NONE if missing else Orders.INSTALL)

    @contextmanager
    def _phase_of(self, phase: RolloutPhase) -> Iterator[None]:
        """Measure the block as part of a batch's step; the present rollout phase is interrupted."""
        assert self.phase is not None
        self.meter.begin(phase)
        yield
        self.meter.begin(self.phase)

    def _admit(self, step: int) -> None:
        """Admit prompts, unless a stop has interrupted the step."""
        if self.phase is None:
            self._begin_phase(step + len(self.queue))
        else:
            self.meter.begin(self.phase)
        if not self.halted:
            self.rollouts.admit()
        self.halted = False

    @property
    def exhausted(self) -> bool:
        return super().exhausted and not self.queue

    @property
    def queued(self) -> Sequence[Rollout]:
        return [rollout for taken in self.queue if taken.scored is None for rollout in taken.batch]

    @property
    def position(self) -> Position:
        return Position(self.done, self.buffer.clock if self.halted else -1)

    def state_dict(self) -> dict[str, Any]:
        """Include the queue, whose first batch is not scored yet between steps and when halted."""
        return super().state_dict() | {"queue": [taken.state_dict() for taken in self.queue], "halted": self.halted}

    def load_state_dict(self, state: Mapping[str, Any], held: Sequence[Rollout]) -> None:
        by_id = {rollout.seq_id: rollout for rollout in held}
        for entry in state.get("queue", ()):
            if batch := [by_id.pop(seq_id) for seq_id in entry["seq_ids"] if seq_id in by_id]:  # a rollback leaves some out
                phase = RolloutPhase.from_state(entry["phase"])
                phase.facts.figures = entry["figures"]
                self.queue.append(Taken(batch, phase, entry["clock"]))
        super().load_state_dict(state, list(by_id.values()))
        self.buffer.pending = state["scheduler"]["buffer"].get("pending", 0)
        self.halted = state.get("halted", state["phase"] is not None)
        self.phase = None if state["phase"] is None else RolloutPhase.from_state(state["phase"])
