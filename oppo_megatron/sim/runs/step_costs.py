"""Seconds of the parts of a step: the actions of its rounds, its updates, moves of weights, and fixed costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oppo_megatron.schedule.weaving.costs import Costs, Linear


@dataclass(frozen=True)
class StepCosts:
    """Seconds of everything that a step does.

    `actions`: of the rounds, by role and stage.  `updates`: of a trained role's update, by the response tokens of the batch that
    is trained (prompts are in the fixed part), the move of its weights left out; `moves`: of that.  `round_s` and `step_s` come
    on top of each round and of each step, on every rank.  `sources` say where the figures are from.
    """

    actions: Costs = Costs()
    updates: Mapping[str, Linear] = field(default_factory=dict)
    moves: Mapping[str, float] = field(default_factory=dict)
    round_s: float = 0.0
    step_s: float = 0.0
    sources: tuple[str, ...] = ()

    def update_s(self, role: str, tokens: int) -> float:
        """Return the seconds of one role's update; 0 if it is not trained."""
        return self.updates[role](tokens) if role in self.updates else 0.0
