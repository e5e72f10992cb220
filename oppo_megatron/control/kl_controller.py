from __future__ import annotations

import math
from typing import Any

from oppo_megatron.config.ppo import KLConfig

MAX_ERROR = 0.2
"""Bound of the relative error (Ziegler et al. 2019, section 2.2)."""

GAIN = 0.1
"""Change of beta per bounded error: K_beta of Ziegler et al. 2019, section 2.2."""


class KLController:
    """Adaptive (Ziegler et al. 2019): beta <- beta * (1 + 0.1 clip((KL - target) / target, -0.2, 0.2)) after every step."""

    def __init__(self, config: KLConfig):
        self._target, self.value = config.target, config.coefficient

    def observe(self, kl_per_response: float) -> float:
        assert math.isfinite(kl_per_response), f"KL per response {kl_per_response} should have been refused earlier"
        if self._target is not None:
            error = kl_per_response / self._target - 1
            self.value *= 1 + GAIN * max(-MAX_ERROR, min(MAX_ERROR, error))
        return self.value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._target is not None:
            self.value = state["value"]
