"""Controllers of delta, the number of rollouts decoded beyond the batch.

Legend: R_t is the mean reward of step t's batch, W (w in eq. 4) the window in steps.

The OPPO paper gives two rules that disagree in sign: eq. 4 grows delta while the reward improves, line 24 of Algorithm
1 shrinks it.  Its prose (delta decays to its minimum as training converges) agrees with eq. 4.  All are built:

=============  ================================================================================
`eq4`          eq. 4 with the windowed means of Algorithm 1 (line 22) as the slope; the default
`algorithm1`   lines 21-27 of Algorithm 1 to the letter
`eq4_literal`  eq. 4 as printed; its mean of differences telescopes to (R_t - R_{t-w}) / w
`fixed`        delta stays as configured; plain PPO is `fixed` at 0
=============  ================================================================================
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.records import Decision


class DeltaController(ABC):
    """Watches the mean reward of each step and sets delta for the next one.

    `value` is delta for the coming step.  Every rule keeps as many past rewards as it may still look at, and no more.
    """

    def __init__(self, config: DeltaConfig):
        self._config = config
        self._value = config.initial
        self._rewards: list[float] = []

    @property
    def value(self) -> int:
        return self._value

    def observe(self, step: int, reward_mean: float) -> Decision:
        """Take the mean reward of `step`'s batch and decide delta for the step after it."""
        assert math.isfinite(reward_mean), f"step {step}: mean reward {reward_mean} should have been refused earlier"
        before = self._value
        self._rewards.append(reward_mean)
        self._value, reason = self._decide()
        return Decision(self._value, f"step {step}: {reason}", self._value != before)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in plain JSON types."""
        return {"rule": self._config.rule, "value": self._value, "rewards": list(self._rewards)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`.  CheckpointError where it was saved under another rule."""
        if state["rule"] != self._config.rule:
            raise CheckpointError(
                f"the checkpoint's delta was controlled by rule '{state['rule']}', the configuration says "
                f"'{self._config.rule}'; resume with overlap.delta.rule={state['rule']} or start a new run"
            )
        self._value = state["value"]
        self._rewards = list(state["rewards"])

    @abstractmethod
    def _decide(self) -> tuple[int, str]:
        """The new delta and why; `_rewards` ends with the step just observed."""

    def _clip(self, delta: int) -> int:
        return max(self._config.min, min(self._config.max, delta))

    def _follow(self, slope: float, figures: str) -> tuple[int, str]:
        """Eq. 4's two cases."""
        old = self._value
        change = self._config.increase if slope > 0 else -self._config.decrease
        new = self._clip(old + change)
        trend = "improves" if slope > 0 else "does not improve"
        return new, f"{figures}: the reward {trend}, delta {old} {change:+d} -> {new}{self._bounds()}"

    def _bounds(self) -> str:
        return f" (within {self._config.min}..{self._config.max})"

    def _wait(self, needed: int) -> tuple[int, str]:
        return self._value, f"delta stays {self._value}: {len(self._rewards)} of {needed} rewards that the rule needs"


class Eq4Delta(DeltaController):
    """Eq. 4 each step, with slope = mean(last W rewards) - mean(the W before)."""

    def _decide(self) -> tuple[int, str]:
        window = self._config.window
        self._rewards = self._rewards[-2 * window :]
        if len(self._rewards) < 2 * window:
            return self._wait(2 * window)
        difference, figures = compare_windows(self._rewards, window)
        return self._follow(difference, figures)


class Algorithm1Delta(DeltaController):
    """Algorithm 1, lines 21-27: moves against the reward's trend by a quarter of delta, once in W steps."""

    def _decide(self) -> tuple[int, str]:
        window = self._config.window
        if len(self._rewards) < 2 * window:
            return self._wait(2 * window)
        difference, figures = compare_windows(self._rewards, window)
        self._rewards = self._rewards[-window:]
        old = self._value
        change = max(1, old // 4)
        sign = (difference > 0) - (difference < 0)
        new = self._clip(old - sign * change)
        return new, f"{figures}: delta {old} - ({sign}) * {change} -> {new}{self._bounds()}"


class Eq4LiteralDelta(DeltaController):
    """Eq. 4 each step, with the slope as printed: s_t = (R_t - R_{t-w}) / w."""

    def _decide(self) -> tuple[int, str]:
        window = self._config.window
        self._rewards = self._rewards[-(window + 1) :]
        if len(self._rewards) < window + 1:
            return self._wait(window + 1)
        oldest, newest = self._rewards[0], self._rewards[-1]
        slope = (newest - oldest) / window
        return self._follow(slope, f"reward {newest:.4g} against {oldest:.4g} {window} steps ago, slope {slope:+.4g}")


class FixedDelta(DeltaController):
    """Delta as configured, whatever the reward does."""

    def _decide(self) -> tuple[int, str]:
        self._rewards.clear()
        return self._value, f"delta is fixed at {self._value}"


def compare_windows(rewards: Sequence[float], window: int) -> tuple[float, str]:
    """Algorithm 1, line 22: mean of the last `window` rewards minus mean of the `window` before, and both as text."""
    # fsum rounds once, so that the order of equal rewards cannot make a flat curve look like a slope.
    last = math.fsum(rewards[-window:]) / window
    before = math.fsum(rewards[-2 * window : -window]) / window
    difference = last - before
    return difference, f"mean reward {last:.4g} over {window} steps against {before:.4g} before ({difference:+.4g})"


RULES: dict[str, type[DeltaController]] = {
    "eq4": Eq4Delta,
    "algorithm1": Algorithm1Delta,
    "eq4_literal": Eq4LiteralDelta,
    "fixed": FixedDelta,
}


def make_delta_controller(config: DeltaConfig) -> DeltaController:
    """The controller of `config.rule`."""
    return RULES[config.rule](config)
