"""Controllers of delta. In the OPPO paper, eq. 4 (default) increases it while the reward improves, Algorithm 1 decreases it."""

from __future__ import annotations

import json
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from statistics import mean
from typing import Any

from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.config.ppo import KLConfig
from oppo_megatron.errors import CheckpointError, DataError
from oppo_megatron.nesting import DEEPEST, check_value
from oppo_megatron.plugins import Plugin
from oppo_megatron.records import TIE, Decision, StepSignals

DEEPEST_MEMORY = DEEPEST // 2
"""Nested lists and dicts of a user's rule: a checkpoint holds them within its own."""


class DeltaController(ABC):
    def __init__(self, config: DeltaConfig):
        self._config = config
        self.value = config.initial

    def observe(self, step: int, signals: StepSignals) -> Decision:
        reward = signals.reward_mean
        assert math.isfinite(reward), f"step {step}: mean reward {reward} should have been refused earlier"
        before = self.value
        self.value, reason = self._take(signals)
        return Decision(self.value, f"step {step}: {reason}", self.value != before)

    def state_dict(self) -> dict[str, Any]:
        return {"rule": self._config.rule, "value": self.value, **self._memory()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises CheckpointError if the rule differs."""
        if state["rule"] != self._config.rule:
            raise CheckpointError(
                f"the checkpoint's delta was controlled by rule '{state['rule']}', the configuration says "
                f"'{self._config.rule}'; resume with overlap.delta.rule={state['rule']} or start a new run"
            )
        self.value = self._clip(state["value"])
        self._recall(state)

    @abstractmethod
    def _take(self, signals: StepSignals) -> tuple[int, str]:
        """Return the new delta and the reason."""

    def _memory(self) -> dict[str, Any]:
        return {}

    @abstractmethod
    def _recall(self, state: dict[str, Any]) -> None: ...

    def _clip(self, delta: int) -> int:
        return max(0, min(self._config.max, delta))

    def _bounds(self) -> str:
        return f" (within 0..{self._config.max})"


class RewardDelta(DeltaController):
    def __init__(self, config: DeltaConfig):
        super().__init__(config)
        self._rewards: list[float] = []

    @abstractmethod
    def _decide(self) -> tuple[int, str]: ...

    @property
    def _needed(self) -> int:
        return 2 * self._config.window

    def _take(self, signals: StepSignals) -> tuple[int, str]:
        self._rewards = [*self._rewards, signals.reward_mean][-self._needed :]
        if len(self._rewards) < self._needed:
            return self.value, f"delta stays {self.value}: {len(self._rewards)} of {self._needed} rewards that the rule needs"
        return self._decide()

    def _memory(self) -> dict[str, Any]:
        return {"rewards": list(self._rewards)}

    def _recall(self, state: dict[str, Any]) -> None:
        self._rewards = list(state["rewards"])

    def _follow(self, slope: float, figures: str) -> tuple[int, str]:
        old = self.value
        change = 1 if slope > 0 else -1
        new = self._clip(old + change)
        trend = "improves" if slope > 0 else "does not improve"
        return new, f"{figures}: the reward {trend}, delta {old} {change:+d} -> {new}{self._bounds()}"


class Eq4Delta(RewardDelta):
    """Eq. 4 with the windowed means of Algorithm 1, line 22."""

    def _decide(self) -> tuple[int, str]:
        return self._follow(*compare_windows(self._rewards, self._config.window))


class Algorithm1Delta(RewardDelta):
    """Algorithm 1, lines 21-27: a quarter of delta against the trend, every W steps."""

    def _decide(self) -> tuple[int, str]:
        window = self._config.window
        difference, figures = compare_windows(self._rewards, window)
        self._rewards = self._rewards[-window:]
        old = self.value
        change = max(1, old // 4)
        sign = (difference > 0) - (difference < 0)
        new = self._clip(old - sign * change)
        return new, f"{figures}: delta {old} - ({sign}) * {change} -> {new}{self._bounds()}"


class Eq4LiteralDelta(RewardDelta):
    """Eq. 4 as printed: its mean of differences telescopes to (R_t - R_{t-W}) / W."""

    @property
    def _needed(self) -> int:
        return self._config.window + 1

    def _decide(self) -> tuple[int, str]:
        window, oldest, newest = self._config.window, self._rewards[0], self._rewards[-1]
        slope = change(newest, oldest, self._rewards) / window
        return self._follow(slope, f"reward {newest:.4g} against {oldest:.4g} {window} steps ago, slope {slope:+.4g}")


class FixedDelta(DeltaController):
    def _take(self, signals: StepSignals) -> tuple[int, str]:
        return self.value, f"delta is fixed at {self.value}"

    def _recall(self, state: dict[str, Any]) -> None:
        self.value = self._config.initial


class CustomDelta(DeltaController):
    def __init__(self, config: DeltaConfig, of_first_rank: Callable[[int], int] = int):
        super().__init__(config)
        self._plugin, self._kept = Plugin.load("overlap.delta.rule", config.rule), dict[str, Any]()
        self._of_first_rank = of_first_rank

    def _take(self, signals: StepSignals) -> tuple[int, str]:
        plugin, old, again = self._plugin, self.value, deepcopy(self._kept)
        wanted, repeated = plugin(signals, old, self._kept), plugin(signals, old, again)
        if isinstance(wanted, bool) or not isinstance(wanted, Integral):
            raise plugin.refuse(f"returned {wanted!r:.60}", "return the next delta, a whole number")
        try:
            check_value(self._kept, DEEPEST_MEMORY)
            plain = json.loads(json.dumps(self._kept, allow_nan=False)) == self._kept
        except (DataError, TypeError, ValueError):
            plain = False
        if not plain:
            remedy = f"keep numbers, texts, lists and dicts with texts as keys, nested at most {DEEPEST_MEMORY} deep"
            raise plugin.refuse(f"keeps {reprlib.repr(self._kept)}", remedy)
        if (wanted, self._kept) != (repeated, again):
            raise plugin.refuse("decided twice differently", "make it deterministic: every rank calls it for itself")
        new = self._clip(int(wanted))
        if (first := self._of_first_rank(new)) != new:
            raise plugin.refuse(f"gives {new} on this rank and {first} on rank 0", "let it depend on its arguments alone")
        return new, f"{self._config.rule} wants {wanted}: delta {old} -> {new}{self._bounds()}"

    def _memory(self) -> dict[str, Any]:
        return {"memory": deepcopy(self._kept)}

    def _recall(self, state: dict[str, Any]) -> None:
        self._kept = deepcopy(state["memory"])


@dataclass(frozen=True)
class Ceiling:
    """A limit on delta, after growth beyond it was reverted for `signal`; `level`: its worst window mean at the current delta."""

    delta: int
    signal: str
    level: float | None = None

    def after(self, now: float, band: float) -> Ceiling | None:
        """Next ceiling; None once `now` is better than `level` by more than `band`."""
        if self.level is None:
            return replace(self, level=now)
        if self.signal == "length_gap":
            return None if now < self.level - band else replace(self, level=max(self.level, now))
        return None if now > self.level + band else replace(self, level=min(self.level, now))


@dataclass(frozen=True)
class Bounds:
    target_waste: float = 0.35
    dead_band: float = 0.05
    ess_floor: float = 0.8
    length_gap_cap: float = 0.4

    def __post_init__(self) -> None:
        assert self.target_waste + self.dead_band < 1, "no decode batch is emptier, so delta would never grow"


BOUNDS = Bounds()


class MeasuredDelta(DeltaController):
    """ "Delta from measured signals" (docs/algorithm.md)."""

    def __init__(self, config: DeltaConfig, bounds: Bounds = BOUNDS):
        super().__init__(config)
        self._bounds_of = bounds
        self._steps: list[StepSignals] = []  # the last W
        self._age = 0  # steps in the present window
        self._broken = False  # one of them broke a bound
        self._grown = False  # in the first window after a growth
        self._ceiling: Ceiling | None = None

    def _take(self, signals: StepSignals) -> tuple[int, str]:
        window = self._config.window
        self._steps = [*self._steps, signals][-window:]
        self._age += 1
        bounds, gap, broken, figures = self._bounds_of, self._mean("length_gap"), "", ""
        if not signals.ess >= bounds.ess_floor:
            broken, figures = "ess", f"ess {signals.ess:.3f} is below its floor of {bounds.ess_floor:g}"
        elif not gap <= bounds.length_gap_cap:
            steps = f"over {len(self._steps)} steps"
            broken, figures = "length_gap", f"length gap {gap:+.3f} {steps} is above its cap of {bounds.length_gap_cap:g}"
        if broken:
            self._broken = True
            new, reason = self._shrink(broken, figures)
        elif self._age < window:
            new, reason = self._stay(f"{self._age} of {window} steps that the rule averages")
        else:
            new, reason = self._weigh_waste(signals)
        if self._age >= window:
            self._age, self._broken = 0, False
        return new, reason

    def _weigh_waste(self, signals: StepSignals) -> tuple[int, str]:
        config, bounds, waste = self._config, self._bounds_of, self._mean("tail_waste")
        low, high = bounds.target_waste - bounds.dead_band, bounds.target_waste + bounds.dead_band
        measured = f"tail waste {waste:.3f} over {config.window} steps is"
        bias = f", ess {signals.ess:.3f} and length gap {self._mean('length_gap'):+.3f} are within bounds"
        if waste < low:
            return self._shrink("tail_waste", f"{measured} below {low:g}")
        if waste <= high:
            self._grown = False
            return self._stay(f"{measured} within {low:g}..{high:g}{bias}")
        if self._broken:
            return self._stay(f"{measured} above {high:g}, but a step of them broke a bound")
        return self._grow(f"{measured} above {high:g}{bias}")

    def _stay(self, figures: str) -> tuple[int, str]:
        return self.value, f"{figures}: delta stays {self.value}"

    def _shrink(self, signal: str, figures: str) -> tuple[int, str]:
        old = self.value
        new = self._clip(old - 1)
        if new < old and self._grown:
            self._ceiling = Ceiling(old - 1, signal)
        self._moved(new, grown=False)
        return new, f"{figures}: delta {old} -1 -> {new}{self._bounds()}"

    def _grow(self, figures: str) -> tuple[int, str]:
        if self._ceiling is not None:
            self._ceiling = self._ceiling.after(self._mean(self._ceiling.signal), self._bounds_of.dead_band)
        old, ceiling = self.value, self._ceiling
        new = self._clip(old + 1)
        if ceiling is not None and new > ceiling.delta:
            new = max(old, ceiling.delta)
            figures += f", {ceiling.delta + 1} was taken back for its {ceiling.signal.replace('_', ' ')}"
        self._moved(new, grown=True)
        return new, f"{figures}: delta {old} +1 -> {new}{self._bounds()}"

    def _moved(self, new: int, *, grown: bool) -> None:
        self._grown = grown and new != self.value
        if new != self.value and self._ceiling is not None:
            self._ceiling = replace(self._ceiling, level=None)

    def _mean(self, signal: str) -> float:
        return float(mean(getattr(step, signal) for step in self._steps))

    def _memory(self) -> dict[str, Any]:
        return {
            "steps": [asdict(step) for step in self._steps],
            "age": self._age,
            "broken": self._broken,
            "grown": self._grown,
            "ceiling": None if self._ceiling is None else asdict(self._ceiling),
        }

    def _recall(self, state: dict[str, Any]) -> None:
        self._steps = [StepSignals(**step) for step in state["steps"]]
        self._age, self._broken, self._grown = state["age"], state["broken"], state["grown"]
        self._ceiling = None if state["ceiling"] is None else Ceiling(**state["ceiling"])


def change(newer: float, older: float, rewards: Sequence[float]) -> float:
    """Return the difference, or 0 within `TIE`: rounding must not move delta."""
    difference = newer - older
    return difference if abs(difference) > TIE * max(map(abs, rewards)) else 0.0


def compare_windows(rewards: Sequence[float], window: int) -> tuple[float, str]:
    """Algorithm 1, line 22."""
    # fsum rounds once, so the order of equal rewards cannot look like a slope
    last = math.fsum(rewards[-window:]) / window
    before = math.fsum(rewards[-2 * window : -window]) / window
    difference = change(last, before, rewards[-2 * window :])
    return difference, f"mean reward {last:.4g} over {window} steps against {before:.4g} before ({difference:+.4g})"


RULES: dict[str, type[DeltaController]] = {
    "eq4": Eq4Delta,
    "algorithm1": Algorithm1Delta,
    "eq4_literal": Eq4LiteralDelta,
    "measured": MeasuredDelta,
    "fixed": FixedDelta,
}


def make_delta_controller(config: DeltaConfig, of_first_rank: Callable[[int], int] = int) -> DeltaController:
    rule = RULES.get(config.rule)
    return CustomDelta(config, of_first_rank) if rule is None else rule(config)


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
