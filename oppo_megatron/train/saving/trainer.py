"""What a checkpoint takes of the loop, and gives back to it."""

from __future__ import annotations

from typing import Any, Protocol

from oppo_megatron.config.run import TrainConfig
from oppo_megatron.control.chunk import ChunkTuner
from oppo_megatron.control.kl import KLController
from oppo_megatron.engine.rounds import RoundRunner
from oppo_megatron.overcommit.scheduler import OvercommitScheduler
from oppo_megatron.rundir.trace import SpanRecorder
from oppo_megatron.train.actor import Actor
from oppo_megatron.train.critic import Critic
from oppo_megatron.train.guards.guard import Guard
from oppo_megatron.train.logs.journal import Journal
from oppo_megatron.train.logs.round_trace import RoundTracer
from oppo_megatron.train.memory import MemoryMeter
from oppo_megatron.train.saving.phase import RolloutPhase


class KeepsState(Protocol):
    """A part whose state is plain JSON, None where it has none."""

    def state_dict(self) -> dict[str, Any] | None: ...

    def load_state_dict(self, state: dict[str, Any] | None) -> None: ...


class Trainer(Protocol):
    """The PPO loop on one rank, as a checkpoint sees it: `train/ppo.py` says what each part is."""

    config: TrainConfig
    scheduler: OvercommitScheduler
    rounds: RoundRunner
    chunk_tuner: ChunkTuner
    kl: KLController
    spans: SpanRecorder
    tracer: RoundTracer
    memory: MemoryMeter
    actor: Actor | None
    critic: Critic | None
    guard: Guard
    journal: Journal | None
    done: int
    settled: int
    phase: RolloutPhase | None

    @property
    def evaluator(self) -> KeepsState | None: ...

    def settle(self) -> None: ...
