"""The state of a run on one rank: the counters of the loop, and the state of its parts for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.train.evaluate import Evaluator
from oppo_megatron.train.guards.rollback import Rollbacks
from oppo_megatron.train.logs.meter import RolloutPhase, StepMeter
from oppo_megatron.train.rollouts import Rollouts
from oppo_megatron.train.update import History
from oppo_megatron.train.updates import Adaptation, Updates


@dataclass
class RunState:
    """`done` counts trained steps; `phase` is the current step's, if a run stops or resumes within one."""

    parts: Rollouts
    updates: Updates
    adaptation: Adaptation
    evaluator: Evaluator | None
    meter: StepMeter
    done: int = 0
    phase: RolloutPhase | None = None

    @property
    def position(self) -> Position:
        return Position(self.done, self.buffer.clock if self.within_step else -1)

    @property
    def within_step(self) -> bool:
        return self.phase is not None

    @property
    def admitted(self) -> int:
        return self.parts.scheduler.position

    @property
    def buffer(self) -> RolloutBuffer:
        return self.parts.buffer

    @property
    def rounds(self) -> RoundRunner:
        return self.parts.rounds

    @property
    def models(self) -> Mapping[str, TrainedModel]:
        roles = {"actor": self.updates.actor, "critic": self.updates.critic}
        return {name: role.role.trained for name, role in roles.items() if role is not None}

    @property
    def rollbacks(self) -> Rollbacks:
        return self.updates.guard.rollbacks

    @property
    def note(self) -> Callable[[str], None] | None:
        journal = self.meter.journal
        return None if journal is None else journal.progress.note

    def finish_step(self) -> None:
        """Complete the last step's line and all actions of rounds; collective of the world."""
        if self.meter.settled != self.done:
            with self.meter.part("wait_update"):
                critic_stats = self.updates.exchange.critic_stats()
                self.meter.all_memory()
            self.meter.settle(self.done, critic_stats)
        self.meter.tracer.flush()
        self.meter.spans.flush()
        self.rounds.executor.drain()
        self.meter.memory.of_all_ranks()

    def publish(self) -> None:
        for role in (self.updates.actor, self.updates.critic):
            if role is not None:
                role.role.publish()

    def refill(self) -> None:
        self.rounds.admit(self.parts.scheduler.refill())

    def state_dict(self) -> dict[str, Any]:
        actor, journal = self.updates.actor, self.meter.journal
        assert actor is not None and journal is not None
        return {
            "done": self.done,
            "scheduler": self.parts.scheduler.state_dict(),
            "filter": None if self.parts.filter is None else self.parts.filter.state_dict(),
            "chunk": self.adaptation.chunk.state_dict(),
            "kl": self.adaptation.kl.state_dict(),
            "early_stop": None if self.evaluator is None else self.evaluator.state_dict(),
            "guard": self.updates.guard.state_dict(),
            "actor": {"version": self.updates.version, "ess": actor.ess},
            "history": self.updates.history.numbers(),
            "updates": actor.role.trained.updates,  # the critic has made these, and its warm-up's
            "phase": None if self.phase is None else self.phase.state_dict(),
            "journal": journal.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], rollouts: Sequence[Rollout]) -> None:
        self.done = self.meter.settled = state["done"]
        self.parts.scheduler.load_state_dict(state["scheduler"], rollouts)
        if self.parts.filter is not None:
            self.parts.filter.load_state_dict(state.get("filter"))
        self.adaptation.chunk.load_state_dict(state["chunk"])
        self.adaptation.kl.load_state_dict(state["kl"])
        if self.evaluator is not None:
            self.evaluator.load_state_dict(state.get("early_stop"))
        self.updates.guard.load_state_dict(state["guard"])
        self.updates.version, self.updates.history = state["actor"]["version"], History.of(state.get("history", {}))
        if self.updates.actor is not None:
            self.updates.actor.ess = state["actor"]["ess"]
        if state["phase"] is not None:
            self.phase = RolloutPhase.from_state(state["phase"])
        if self.meter.journal is not None:
            self.meter.journal.load_state_dict(state["journal"])
        self.rounds.admit(self.buffer.rollouts)
