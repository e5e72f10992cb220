"""The interface through which a checkpoint saves and restores a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from oppo_megatron.engine.round_runner import RoundRunner
from oppo_megatron.mcore.training import TrainedModel
from oppo_megatron.overcommit.buffer import RolloutBuffer
from oppo_megatron.records import Rollout
from oppo_megatron.rundir.checkpoints import Position
from oppo_megatron.train.guards.rollback import Rollbacks


class Saveable(Protocol):
    """One rank's part of a run, between two rounds.  `note` tells the user, on the rank that keeps the journal."""

    @property
    def position(self) -> Position: ...

    @property
    def within_step(self) -> bool: ...

    @property
    def admitted(self) -> int:
        """The position in the stream of prompts behind the last one admitted."""
        ...

    @property
    def buffer(self) -> RolloutBuffer: ...

    @property
    def rounds(self) -> RoundRunner:
        """Whose caches and books are saved."""
        ...

    @property
    def models(self) -> Mapping[str, TrainedModel]:
        """Those of this rank, by role."""
        ...

    @property
    def rollbacks(self) -> Rollbacks: ...

    @property
    def note(self) -> Callable[[str], None] | None: ...

    def settle(self) -> None:
        """Every rank meets, and nothing is under way."""
        ...

    def publish(self) -> None:
        """The weights that were loaded reach where they decode and score."""
        ...

    def refill(self) -> None:
        """Prompts enter in the place of rollouts that were left out of a step under way."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All but models, caches and rollouts, in plain JSON types, on the rank that keeps the journal."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], rollouts: Sequence[Rollout]) -> None:
        """Restore the state on every rank, before its first round; books and caches are restored separately."""
        ...
