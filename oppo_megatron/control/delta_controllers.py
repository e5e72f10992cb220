"""Controllers of delta, the number of rollouts decoded beyond the batch.

Legend: R_t is the mean reward of step t's batch, W (w in eq. 4) the window in steps.

There are two kinds of rules: from the reward's trend, as in the paper, and from the costs and savings of overcommitment.

The OPPO paper gives two rules that disagree in sign: eq. 4 grows delta while the reward improves, line 24 of Algorithm
1 shrinks it.  Its prose (delta decays to its minimum as training converges) agrees with eq. 4.

=============  ================================================================================
`eq4`          eq. 4 with the windowed means of Algorithm 1 (line 22) as the slope; the default
`algorithm1`   lines 21-27 of Algorithm 1 to the letter
`eq4_literal`  eq. 4 as printed; its mean of differences telescopes to (R_t - R_{t-w}) / w
`measured`     grows with empty decode steps, shrinks with bias (`MeasuredDelta`)
`fixed`        delta stays as configured; plain PPO is `fixed` at 0
=============  ================================================================================

Every signal is the same number on all ranks, so all of them decide alike (`StepSignals`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from oppo_megatron.config.overlap import DeltaConfig
from oppo_megatron.errors import CheckpointError
from oppo_megatron.records import TIE, Decision, StepSignals


class DeltaController(ABC):
    """Watches what each step has shown and sets delta for the next one.  `value` is delta for the coming step."""

    def __init__(self, config: DeltaConfig):
        self._config = config
        self._value = config.initial

    @property
    def value(self) -> int:
        return self._value

    def observe(self, step: int, signals: StepSignals) -> Decision:
        """Take what `step` has shown and decide delta for the step after it."""
        reward = signals.reward_mean
        assert math.isfinite(reward), f"step {step}: mean reward {reward} should have been refused earlier"
        before = self._value
        self._value, reason = self._take(signals)
        return Decision(self._value, f"step {step}: {reason}", self._value != before)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in plain JSON types."""
        return {"rule": self._config.rule, "value": self._value, **self._memory()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, within the bounds of now.  CheckpointError where it was saved under another rule."""
        if state["rule"] != self._config.rule:
            raise CheckpointError(
                f"the checkpoint's delta was controlled by rule '{state['rule']}', the configuration says "
                f"'{self._config.rule}'; resume with overlap.delta.rule={state['rule']} or start a new run"
            )
        self._value = self._clip(state["value"])
        self._recall(state)

    @abstractmethod
    def _take(self, signals: StepSignals) -> tuple[int, str]:
        """The new delta and why."""

    @abstractmethod
    def _memory(self) -> dict[str, Any]:
        """What the rule remembers beside delta."""

    @abstractmethod
    def _recall(self, state: dict[str, Any]) -> None:
        """Remember again what `_memory` gave."""

    def _clip(self, delta: int) -> int:
        return max(0, min(self._config.max, delta))

    def _bounds(self) -> str:
        return f" (within 0..{self._config.max})"


class RewardDelta(DeltaController):
    """Delta from the rewards.  A rule keeps as many past ones as it may still look at, and no more."""

    def __init__(self, config: DeltaConfig):
        super().__init__(config)
        self._rewards: list[float] = []

    @abstractmethod
    def _decide(self) -> tuple[int, str]:
        """The new delta and why; `_rewards` ends with the step just observed."""

    def _take(self, signals: StepSignals) -> tuple[int, str]:
        self._rewards.append(signals.reward_mean)
        return self._decide()

    def _memory(self) -> dict[str, Any]:
        return {"rewards": list(self._rewards)}

    def _recall(self, state: dict[str, Any]) -> None:
        self._rewards = list(state["rewards"])

    def _follow(self, slope: float, figures: str) -> tuple[int, str]:
        """Eq. 4's two cases."""
        old = self._value
        change = 1 if slope > 0 else -1
        new = self._clip(old + change)
        trend = "improves" if slope > 0 else "does not improve"
        return new, f"{figures}: the reward {trend}, delta {old} {change:+d} -> {new}{self._bounds()}"

    def _wait(self, needed: int) -> tuple[int, str]:
        return self._value, f"delta stays {self._value}: {len(self._rewards)} of {needed} rewards that the rule needs"


class Eq4Delta(RewardDelta):
    """Eq. 4 each step, with slope = mean(last W rewards) - mean(the W before)."""

    def _decide(self) -> tuple[int, str]:
        window = self._config.window
        self._rewards = self._rewards[-2 * window :]
        if len(self._rewards) < 2 * window:
            return self._wait(2 * window)
        difference, figures = compare_windows(self._rewards, window)
        return self._follow(difference, figures)


class Algorithm1Delta(RewardDelta):
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


class Eq4LiteralDelta(RewardDelta):
    """Eq. 4 each step, with the slope as printed: s_t = (R_t - R_{t-w}) / w."""

    def _decide(self) -> tuple[int, str]:
        window = self._config.window
        self._rewards = self._rewards[-(window + 1) :]
        if len(self._rewards) < window + 1:
            return self._wait(window + 1)
        oldest, newest = self._rewards[0], self._rewards[-1]
        slope = change(newest, oldest, self._rewards) / window
        return self._follow(slope, f"reward {newest:.4g} against {oldest:.4g} {window} steps ago, slope {slope:+.4g}")


class FixedDelta(DeltaController):
    """Delta as configured, whatever a step shows."""

    def _take(self, signals: StepSignals) -> tuple[int, str]:
        return self._value, f"delta is fixed at {self._value}"

    def _memory(self) -> dict[str, Any]:
        return {}

    def _recall(self, state: dict[str, Any]) -> None:
        """A delta that is fixed by the configuration stays as configured."""
        self._value = self._config.initial


@dataclass(frozen=True)
class Ceiling:
    """A growth beyond `delta` was taken back because of `signal`.

    `level` is the worst that the signal was over a whole window at the delta in force; None: there was none yet.
    """

    delta: int
    signal: str
    level: float | None = None

    def after(self, now: float, band: float) -> Ceiling | None:
        """The ceiling after another window, in which the signal was `now`: None once it is better by more than `band`.

        Against the worst and not, say, the first: a first window that is good by chance would forbid growth for good.
        """
        if self.level is None:
            return replace(self, level=now)
        if self.signal == "length_gap":
            return None if now < self.level - band else replace(self, level=max(self.level, now))
        return None if now > self.level + band else replace(self, level=min(self.level, now))


@dataclass(frozen=True)
class Bounds:
    """What `measured` holds delta to.

    `target_waste`: share of the decode batch that may run empty; above it delta grows.  `dead_band`: delta stays while the
    waste is no further than this from its target.  `ess_floor`, `length_gap_cap`: delta shrinks at once where the effective
    sample size is below, or where, over a window, the trained responses are shorter than the submitted by a larger share.
    """

    target_waste: float = 0.35
    dead_band: float = 0.05
    ess_floor: float = 0.8
    length_gap_cap: float = 0.4

    def __post_init__(self) -> None:
        assert self.target_waste + self.dead_band < 1, "no decode batch is emptier, so delta would never grow"


BOUNDS = Bounds()


class MeasuredDelta(DeltaController):
    """Delta from what overcommitting saves and costs, as each step has measured it.

    What it saves is *tail waste*, places of the decode batch that run empty while the longest responses end.  What it
    costs is bias: tokens of older policies (`ess`, effective sample size) and batches of the shorter responses (*length
    gap*).  Laws, held by the tests, with W = `window`, band = `dead_band`:

    1. Bias first.  Where the step's ess is below `ess_floor`, or the mean length gap of the last W steps is above
       `length_gap_cap`, delta shrinks by `decrease` in that very step.
    2. Else delta moves once in W steps, by their mean waste: above `target_waste` + band it grows by `increase`, if no step
       of the W broke a bound; below `target_waste` - band it shrinks by `decrease`; in the dead band between it stays.
    3. A growth that is taken back by the end of its first W steps is not tried again until the signal which forbade it has
       become better by more than the band than it has been, at its worst, at the delta in force.
    4. Delta never leaves `min`..`max`.
    5. Convergence: where the signals are functions of delta, whatever functions, delta comes to rest.  There a growth that
       stands its first W steps stands for good, and one that is taken back lowers the ceiling of law 3, which nothing lifts:
       so finitely many are taken back, and between two of them delta goes down, then up.
    6. Monotone: of two steps in the same state, the one with more waste never gets the smaller delta, and the one with less
       ess or a larger length gap never the larger one.  That holds for whole histories too, while none has a ceiling.
    """

    def __init__(self, config: DeltaConfig, bounds: Bounds = BOUNDS):
        super().__init__(config)
        self._bounds_of = bounds
        self._steps: list[StepSignals] = []  # the last W
        self._age = 0  # steps in the present window
        self._broken = False  # whether one of them broke a bound
        self._grown = False  # whether delta has grown, and has not stood its first window yet
        self._ceiling: Ceiling | None = None

    def _take(self, signals: StepSignals) -> tuple[int, str]:
        window = self._config.window
        self._steps = [*self._steps, signals][-window:]
        self._age += 1
        broken = self._broken_bound(signals)
        self._broken = self._broken or broken is not None
        if broken is not None:
            new, reason = self._shrink(*broken)
        elif self._age < window:
            new, reason = self._stay(f"{self._age} of {window} steps that the rule averages")
        else:
            new, reason = self._weigh_waste(signals)
        if self._age >= window:
            self._age, self._broken = 0, False
        return new, reason

    def _broken_bound(self, signals: StepSignals) -> tuple[str, str] | None:
        """The bias signal that is out of bounds, and its figures."""
        bounds, gap = self._bounds_of, self._mean("length_gap")
        if not signals.ess >= bounds.ess_floor:
            return "ess", f"ess {signals.ess:.3f} is below its floor of {bounds.ess_floor:g}"
        if not gap <= bounds.length_gap_cap:
            over = f"over {len(self._steps)} steps"
            return "length_gap", f"length gap {gap:+.3f} {over} is above its cap of {bounds.length_gap_cap:g}"
        return None

    def _weigh_waste(self, signals: StepSignals) -> tuple[int, str]:
        """Law 2, at the end of a window."""
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
        return self._value, f"{figures}: delta stays {self._value}"

    def _shrink(self, signal: str, figures: str) -> tuple[int, str]:
        old = self._value
        new = self._clip(old - 1)
        if new < old and self._grown:
            self._ceiling = Ceiling(old - 1, signal)
        self._moved(new, grown=False)
        return new, f"{figures}: delta {old} -1 -> {new}{self._bounds()}"

    def _grow(self, figures: str) -> tuple[int, str]:
        old, ceiling = self._value, self._ceiling_now()
        new = self._clip(old + 1)
        if ceiling is not None and new > ceiling.delta:
            new = max(old, ceiling.delta)
            figures += f", {ceiling.delta + 1} was taken back for its {ceiling.signal.replace('_', ' ')}"
        self._moved(new, grown=True)
        return new, f"{figures}: delta {old} +1 -> {new}{self._bounds()}"

    def _ceiling_now(self) -> Ceiling | None:
        """The ceiling at the end of a window at one delta (law 3)."""
        if self._ceiling is not None:
            self._ceiling = self._ceiling.after(self._mean(self._ceiling.signal), self._bounds_of.dead_band)
        return self._ceiling

    def _moved(self, new: int, *, grown: bool) -> None:
        """Delta becomes `new`: what was measured at another delta does not count there."""
        self._grown = grown and new != self._value
        if new != self._value and self._ceiling is not None:
            self._ceiling = replace(self._ceiling, level=None)

    def _mean(self, signal: str) -> float:
        """Exact, so that equal steps have their own value as the mean, and law 5 no rounding to fear."""
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
    """newer - older; 0 within `TIE` of the largest of the `rewards`: the sign of a rounding would move delta, and the batches."""
    difference = newer - older
    return difference if abs(difference) > TIE * max(map(abs, rewards)) else 0.0


def compare_windows(rewards: Sequence[float], window: int) -> tuple[float, str]:
    """Algorithm 1, line 22: mean of the last `window` rewards minus mean of the `window` before, and both as text."""
    # fsum rounds once, so that the order of equal rewards cannot make a flat curve look like a slope.
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


def make_delta_controller(config: DeltaConfig) -> DeltaController:
    """The controller of `config.rule`."""
    return RULES[config.rule](config)
