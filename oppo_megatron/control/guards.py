"""Rules for a step's numbers; a non-finite figure takes precedence over limits, `stop` over `rollback`, and that over `skip`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oppo_megatron.config.guards import Action, GuardsConfig

RULES = ("non_finite", "kl_mean", "ratio_max", "ess", "logprob_gap")
FIGURES = (
    "batch", "kl_mean", "actor_loss", "grad_norm", "ratio_max", "ess", "logprob_gap", "logprob_gap_judged",
    "critic_loss", "critic_grad_norm",
)  # fmt: skip
"""The figures that may break a rule.  `batch` means all inputs of the update."""
ACTIONS: tuple[Action, ...] = ("skip", "stop", "rollback")
GRAVEST_FIRST: tuple[Action, ...] = ("stop", "rollback", "skip")
CODE_SIZE = 5
LOWER = "lower the learning rate or ppo.epochs, or raise guards.{rule}.limit if this is how the run should look"
REMEDIES = {
    "non_finite": "look at the rewards, at the log-prob gap and at the gradient norms of the steps before (metrics.jsonl), "
    "lower the learning rate, or set guards.non_finite=skip to go on without such steps",
    "kl_mean": "raise ppo.kl.coefficient, lower the learning rate, or raise guards.kl_mean.limit",
    "ratio_max": LOWER.format(rule="ratio_max"),
    "ess": "lower overlap.max_staleness or delta, so that fewer tokens are stale, or lower guards.ess.limit",
    "logprob_gap": "the two forwards do not compute the same policy. Raise guards.logprob_gap.limit only for low-precision "
    "weights",
}


@dataclass(frozen=True)
class Breach:
    """A rule that a figure breaks.  `limit` is None if the figure is not finite; `detail`, if any, is then the whole message."""

    rule: str
    figure: str
    value: float
    limit: float | None
    action: Action
    detail: str = ""

    @property
    def of_critic(self) -> bool:
        return self.figure.startswith("critic_")

    @property
    def reason(self) -> str:
        if self.figure == "batch":
            return self.detail.partition(";")[0]
        if self.limit is None:
            return f"{self.figure} is {self.value}, no finite number (guards.non_finite)"
        if self.rule == "logprob_gap":
            return (
                f"the log-prob of a token differs by {self.value:.2e} between decoding and training, more than the limit "
                f"of {self.limit:g} (guards.logprob_gap.limit)"
            )
        side = "below" if self.rule == "ess" else "above"
        return f"{self.figure} is {self.value:.4g}, {side} guards.{self.rule}.limit {self.limit:g}"

    @property
    def message(self) -> str:
        return self.detail or f"{self.reason}: {REMEDIES[self.rule]}"

    def encode(self) -> list[float]:
        """Return `CODE_SIZE` numbers, from which `decode` makes the breach without `detail`."""
        limit = math.nan if self.limit is None else self.limit
        return [1 + ACTIONS.index(self.action), RULES.index(self.rule), FIGURES.index(self.figure), self.value, limit]


NO_BREACH = [0.0] * CODE_SIZE


def decode(code: Sequence[float]) -> Breach | None:
    """Decode the result of `Breach.encode`; None for `NO_BREACH`."""
    action, rule, figure, value, limit = code
    if not action:
        return None
    bound = None if math.isnan(limit) else limit
    return Breach(RULES[int(rule)], FIGURES[int(figure)], value, bound, ACTIONS[int(action) - 1])


def gravest(breaches: Sequence[Breach | None]) -> Breach | None:
    found = [breach for breach in breaches if breach is not None]
    return min(found, key=lambda breach: GRAVEST_FIRST.index(breach.action), default=None)


@dataclass(frozen=True)
class Rules:
    config: GuardsConfig
    gap_limit: float | None

    @property
    def undo_updates(self) -> bool:
        return "skip" in self._in_update

    @property
    def agree_on_updates(self) -> bool:
        return self.undo_updates or "rollback" in self._in_update

    @property
    def _in_update(self) -> set[Action]:
        """Actions of the rules that an update can break."""
        return {action for rule, action in self.config.in_force(self.gap_limit).items() if rule != "kl_mean"}

    def check(self, figures: Mapping[str, float]) -> Breach | None:
        known = {name: figures[name] for name in FIGURES if name in figures}
        found = [self.non_finite(name, value) for name, value in known.items() if not math.isfinite(value)]
        for rule, (limit, action) in self.config.limits(self.gap_limit).items():
            value = known.get("logprob_gap_judged", known.get(rule)) if rule == "logprob_gap" else known.get(rule)
            if value is None or not math.isfinite(value):
                continue
            if value < limit if rule == "ess" else value > limit:
                found.append(Breach(rule, rule, value, limit, action))
        return gravest(found)

    def non_finite(self, figure: str, value: float, detail: str = "") -> Breach:
        return Breach("non_finite", figure, value, None, self.config.non_finite, detail)
