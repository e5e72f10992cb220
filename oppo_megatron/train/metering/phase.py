"""A step's rollout phase, which a checkpoint may interrupt."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from oppo_megatron.control.chunk import DecodeLaw
from oppo_megatron.control.occupancy import Occupancy
from oppo_megatron.train.logs.facts import LATER_FACTS, StepFacts


@dataclass
class RolloutPhase:
    """The rollout phase of a step under way: it began at logical clock `begun`, and took `spent_s` before an interruption."""

    facts: StepFacts
    occupancy: Occupancy
    begun: int
    spent_s: float = 0.0
    law: DecodeLaw = field(default_factory=DecodeLaw)  # of the rounds since the last interruption

    def state_dict(self) -> dict[str, Any]:
        facts = {name: value for name, value in asdict(self.facts).items() if name not in LATER_FACTS}
        return {"facts": facts, "occupancy": self.occupancy.state_dict(), "begun": self.begun, "spent_s": self.spent_s}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RolloutPhase:
        occupancy = Occupancy.from_state(state["occupancy"])
        return cls(StepFacts(**state["facts"]), occupancy, state["begun"], state["spent_s"])
