from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from oppo_megatron.config.reliability import GuardsConfig

RULES = ("non_finite", "kl_mean", "ratio_max", "ess", "logprob_gap")
FIGURES = (
    "batch", "kl_mean", "actor_loss", "grad_norm", "ratio_max", "ess", "logprob_gap", "logprob_gap_judged",
    "critic_loss", "critic_grad_norm",
)  # fmt: skip
"""Figures that may break a rule; `batch`: all inputs of the update."""
CODE_SIZE = 4
LOWER = "lower the learning rate or ppo.epochs, or raise guards.{rule} if this is how the run should look"
REMEDIES = {
    "non_finite": "look at the rewards, at the log-prob gap and at the gradient norms of the steps before (metrics.jsonl), "
    "lower the learning rate, or set guards.action=skip to skip such steps",
    "kl_mean": "raise ppo.kl.coefficient, lower the learning rate, or raise guards.kl_mean",
    "ratio_max": LOWER.format(rule="ratio_max"),
    "ess": "lower overlap.max_staleness or delta, so that fewer tokens are stale, or lower guards.ess",
    "logprob_gap": "the two forwards do not compute the same policy. Raise guards.logprob_gap only for low-precision weights",
}


@dataclass(frozen=True)
class Breach:
    """`limit` is None if the figure is not finite; a non-empty `detail` is then the whole message."""

    rule: str
    figure: str
    value: float
    limit: float | None
    detail: str = ""

    @property
    def reason(self) -> str:
        if self.figure == "batch":
            return self.detail.partition(";")[0]
        if self.limit is None:
            return f"{self.figure} is {self.value}, not a finite number"
        if self.rule == "logprob_gap":
            return (
                f"the log-prob of a token differs by {self.value:.2e} between decoding and training, more than the limit "
                f"of {self.limit:g} (guards.logprob_gap)"
            )
        side = "below" if self.rule == "ess" else "above"
        return f"{self.figure} is {self.value:.4g}, {side} guards.{self.rule} {self.limit:g}"

    @property
    def message(self) -> str:
        return self.detail or f"{self.reason}: {REMEDIES[self.rule]}"

    def encode(self) -> list[float]:
        """`CODE_SIZE` numbers for `decode`, without `detail`."""
        limit = math.nan if self.limit is None else self.limit
        return [1 + RULES.index(self.rule), FIGURES.index(self.figure), self.value, limit]


def decode(code: Sequence[float]) -> Breach:
    rule, figure, value, limit = code
    bound = None if math.isnan(limit) else limit
    return Breach(RULES[int(rule) - 1], FIGURES[int(figure)], value, bound)


def first(breaches: Iterable[Breach | None]) -> Breach | None:
    return next((breach for breach in breaches if breach is not None), None)


@dataclass(frozen=True)
class Rules:
    config: GuardsConfig
    gap_limit: float | None

    @property
    def undo_updates(self) -> bool:
        return self.config.action == "skip"

    @property
    def agree_on_updates(self) -> bool:
        return self.config.action != "stop"

    def check(self, figures: Mapping[str, float]) -> Breach | None:
        known = {name: figures[name] for name in FIGURES if name in figures}
        for name, value in known.items():
            if not math.isfinite(value):
                return non_finite(name, value)
        limits = {"kl_mean": self.config.kl_mean, "ratio_max": self.config.ratio_max, "ess": self.config.ess}
        for rule, limit in {**limits, "logprob_gap": self.gap_limit}.items():
            figure = known.get("logprob_gap_judged", known.get(rule)) if rule == "logprob_gap" else known.get(rule)
            if limit is None or figure is None:
                continue
            if figure < limit if rule == "ess" else figure > limit:
                return Breach(rule, rule, figure, limit)
        return None


def non_finite(figure: str, value: float, detail: str = "") -> Breach:
    return Breach("non_finite", figure, value, None, detail)
