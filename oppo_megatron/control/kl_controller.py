"""Controller of the KL coefficient (beta): fixed, or following a target."""

from __future__ import annotations

import math
from typing import Any

from oppo_megatron.config.ppo import KLConfig

MAX_ERROR = 0.2
"""Bound of the relative error in one update (Ziegler et al. 2019, section 2.2)."""

HORIZON = 10_000.0
"""Rollouts over which the coefficient follows the target KL (Ziegler et al. 2019)."""


class KLController:
    """Coefficient of the KL to the reference policy.

    Adaptive (Ziegler et al. 2019): e = clip((KL - target) / target, -0.2, 0.2) and
    beta <- beta * (1 + e * rollouts / horizon).  One update counts for one horizon at most, so beta stays positive.
    """

    def __init__(self, config: KLConfig, horizon: float = HORIZON):
        self._target, self._horizon = config.target, horizon
        self._value = config.coefficient

    @property
    def value(self) -> float:
        """Coefficient for the coming step."""
        return self._value

    def observe(self, kl_per_response: float, num_rollouts: int) -> float:
        """Take the mean KL of a batch's responses (nats) and their number; return the coefficient that follows."""
        assert math.isfinite(kl_per_response), f"KL per response {kl_per_response} should have been refused earlier"
        if self._target is not None:
            error = kl_per_response / self._target - 1
            error = max(-MAX_ERROR, min(MAX_ERROR, error))
            self._value *= 1 + error * min(1.0, num_rollouts / self._horizon)
        return self._value

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in plain JSON types."""
        return {"value": self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; a coefficient that is fixed by the configuration stays as configured."""
        if self._target is not None:
            self._value = state["value"]
